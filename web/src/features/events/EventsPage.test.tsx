import { render, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { EventLine, EventPage } from "@/shared/api/types";
import EventsPage from "./EventsPage";

const LEFT: EventLine = {
  ...{ seq: 1, at: "2026-01-01T00:00:00Z", at_s: 1_767_225_600, job_id: "flights", kind: "WorkerLeft", generation: 2 },
  ...{ worker_id: "rank-1", words: "rank-1 left: <b>killed</b>", reason: "killed" },
};
const asked = vi.fn<typeof fetch>();

function serve(items: EventLine[], status = 200): void {
  asked.mockImplementation((path) => {
    const query = new URL(String(path), "http://page").searchParams;
    const after = Number(query.get("after") ?? 0);
    const kind = query.get("kind") ?? "";
    const found = items.filter((each) => each.seq > after && (kind === "" || each.kind === kind));
    const page: EventPage = { items: found, limit: 1_000, after, next_after: found.at(-1)?.seq ?? after, more: false };
    const refusal = { error: { kind: "Busy", message: "too many requests", field: "" } };
    return Promise.resolve(new Response(JSON.stringify(status === 200 ? page : refusal), { status }));
  });
}

beforeEach(() => {
  window.history.replaceState(null, "", "/events?job=flights");
  asked.mockReset();
  vi.stubGlobal("fetch", asked);
  // The list draws what is in view, and nothing has a size here.
  vi.spyOn(HTMLElement.prototype, "clientHeight", "get").mockReturnValue(600);
});

afterEach(() => {
  vi.unstubAllGlobals();
});

test("an entry of the journal is shown with its kind and its generation, as text", async () => {
  serve([LEFT]);
  render(<EventsPage />);

  expect(await screen.findByText("rank-1 left: <b>killed</b>")).toBeTruthy();
  expect(screen.getByText("Worker left · generation 2")).toBeTruthy();
  expect(screen.getByText("The journal begins here.")).toBeTruthy();
});

test("a filter is part of the address, and can be cleared where nothing matches", async () => {
  serve([LEFT]);
  render(<EventsPage />);
  await screen.findByText(LEFT.words);
  await userEvent.selectOptions(screen.getByLabelText("Kind of event"), "WorkerJoined");

  expect(window.location.search).toContain("kind=WorkerJoined");
  await userEvent.click(await screen.findByRole("button", { name: "Clear the filters" }));
  expect(await screen.findByText(LEFT.words)).toBeTruthy();
});

test("a refused request shows the reason of the server", async () => {
  serve([], 429);
  render(<EventsPage />);
  expect(await screen.findByText("too many requests")).toBeTruthy();
});
