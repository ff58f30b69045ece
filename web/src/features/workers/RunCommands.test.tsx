import { cleanup, render, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { RunInfo } from "@/shared/api/types";
import { RunCommands } from "./RunCommands";

const RUN: RunInfo = { name: "job", min_workers: 1, max_workers: 4, num_workers: 1, may_command: true, live_page: null };
const sent = vi.fn<typeof fetch>();

beforeEach(() => {
  sent.mockReset();
  sent.mockResolvedValue(new Response(null, { status: 204 }));
  vi.stubGlobal("fetch", sent);
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

function bodies(): unknown[] {
  const orders = sent.mock.calls.filter(([, options]) => options?.method === "POST");
  return orders.map(([path, options]) => [path, JSON.parse(String(options?.body))]);
}

test("a stop is sent only after it is confirmed", async () => {
  render(<RunCommands run={RUN} />);
  await userEvent.click(screen.getByText("Stop…"));
  await userEvent.click(screen.getByText("Cancel"));
  expect(sent).not.toHaveBeenCalled();

  await userEvent.click(screen.getByText("Stop…"));
  await userEvent.click(screen.getByText("Save and stop"));
  expect(bodies()).toEqual([["/api/run/stop", { is_now: false }]]);
  expect(screen.queryByText("Save and stop")).toBeNull();
});

test("a refused command shows the server's reason and stays open", async () => {
  const body = { error: { kind: "InvalidArgument", message: "the run is about to end", field: "workers" } };
  const refusal = new Response(JSON.stringify(body), { status: 422 });
  const current = new Response(JSON.stringify({ ...RUN, num_workers: 2 }));
  sent.mockImplementation((path) => Promise.resolve(path === "/api/run" ? current : refusal));
  render(<RunCommands run={RUN} />);
  await userEvent.click(screen.getByText("Scale…"));
  await userEvent.click(await screen.findByText("Continue with 2 workers"));
  expect(await screen.findByText("the run is about to end")).toBeTruthy();
  expect(bodies()).toEqual([["/api/run/scale", { workers: 2 }]]);
});

test("a run of a fixed size has no scale command", () => {
  render(<RunCommands run={{ ...RUN, min_workers: 2, max_workers: 2 }} />);
  expect(screen.queryByText("Scale…")).toBeNull();
});
