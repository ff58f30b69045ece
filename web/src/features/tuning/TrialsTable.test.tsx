import { render, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Page, StudyInfo, StudyTrial } from "@/shared/api/types";
import { TrialsTable } from "./TrialsTable";

const TRIAL: StudyTrial = {
  ...{ number: 7, state: "finished", config: { width: 64 }, values: { loss: 0.25 }, is_feasible: true, is_best: true },
  ...{ step: 300, num_starts: 1, slot: null, num_slots: 0, started_at_s: 1, ended_at_s: 9, duration_s: 8, reason: "" },
  ...{ checkpoint: "", checkpoint_step: 0, donors: [] },
};
const STUDY = {
  ...{ study: "s", name: "sweep", version: "1", reported: ["loss"], metrics: ["loss"], directions: ["min"] },
  ...{ num_trials: 120, counts: { finished: 119, failed: 1 } },
} as unknown as StudyInfo;
const asked = vi.fn<typeof fetch>();

function serve(items: StudyTrial[], total: number): void {
  asked.mockImplementation((path) => {
    const offset = Number(new URL(String(path), "http://page").searchParams.get("offset") ?? 0);
    const rest = offset + 50 < total ? offset + 50 : null;
    const page: Page<StudyTrial> = { items, total, limit: 50, offset, next_offset: rest };
    return Promise.resolve(new Response(JSON.stringify(page)));
  });
}

function last(): URLSearchParams {
  return new URL(String(asked.mock.calls.at(-1)?.[0]), "http://page").searchParams;
}

beforeEach(() => {
  window.history.replaceState(null, "", "/tuning");
  asked.mockReset();
  vi.stubGlobal("fetch", asked);
});

afterEach(() => {
  vi.unstubAllGlobals();
});

test("a trial is a row with its state, result, time and configuration", async () => {
  serve([TRIAL], 1);
  render(<TrialsTable found={STUDY} metric="loss" trial={undefined} />);

  const row = (await screen.findByRole("button", { name: "Trial 7" })).closest("tr") as HTMLElement;
  const cells = within(row).getAllByRole("cell").map((each) => each.textContent);
  expect(cells.slice(1, 5)).toEqual([" finishedbest", "0.25", "300", "8.0 s"]);
  expect(cells[5]).toContain("width");
});

test("a click on a heading sorts on the server, a second one reverses it", async () => {
  serve([TRIAL], 1);
  render(<TrialsTable found={STUDY} metric="loss" trial={undefined} />);
  await userEvent.click(await screen.findByRole("button", { name: "loss" }));
  expect([last().get("sort"), last().get("name"), last().get("desc")]).toEqual(["value", "loss", "false"]);

  await userEvent.click(screen.getByRole("button", { name: /loss/ }));
  expect([last().get("sort"), last().get("desc")]).toEqual(["value", "true"]);
  expect(screen.getByRole("columnheader", { name: /loss/ }).getAttribute("aria-sort")).toBe("descending");
});

test("pages are fetched one by one, and a filter returns to the first", async () => {
  serve([TRIAL], 120);
  render(<TrialsTable found={STUDY} metric="loss" trial={undefined} />);
  await userEvent.click(await screen.findByRole("button", { name: "Next" }));
  expect(last().get("offset")).toBe("50");

  await userEvent.selectOptions(screen.getByLabelText("State"), "failed");
  expect([last().get("state"), last().get("offset")]).toEqual(["failed", "0"]);
});

test("a chosen trial is marked, and choosing it again lets go of it", async () => {
  serve([TRIAL], 1);
  window.history.replaceState(null, "", "/tuning?trial=7");
  render(<TrialsTable found={STUDY} metric="loss" trial={7} />);
  const button = await screen.findByRole("button", { name: "Trial 7" });
  expect(button.getAttribute("aria-pressed")).toBe("true");

  await userEvent.click(button);
  expect(window.location.search).toBe("");
});
