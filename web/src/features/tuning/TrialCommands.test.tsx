import { cleanup, render, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { StudyTrial } from "@/shared/api/types";
import { TrialCommands } from "./TrialCommands";

const TRIAL: StudyTrial = {
  ...{ number: 7, state: "running", config: {}, values: {}, is_feasible: true, is_best: false, step: 3, num_starts: 1 },
  ...{ slot: 0, num_slots: 1, started_at_s: 1, ended_at_s: null, duration_s: 2, reason: "", checkpoint: "" },
  ...{ checkpoint_step: 0, donors: [] },
};
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
  return sent.mock.calls.map(([path, options]) => [path, JSON.parse(String(options?.body))]);
}

test("a trial is stopped only after a confirmation", async () => {
  render(<TrialCommands study="sweep-1" trial={TRIAL} />);
  await userEvent.click(screen.getByText("Stop…"));
  await userEvent.click(screen.getByText("Cancel"));
  expect(sent).not.toHaveBeenCalled();

  await userEvent.click(screen.getByText("Stop…"));
  await userEvent.click(screen.getByText("Stop the trial"));
  expect(bodies()).toEqual([["/api/study/trial/stop", { study: "sweep-1", number: 7 }]]);
  expect(screen.queryByText("Stop the trial")).toBeNull();
});

test("a refused order shows the reason and stays open", async () => {
  const body = { error: { kind: "InvalidArgument", message: "trial 7 has already finished", field: "number" } };
  sent.mockResolvedValue(new Response(JSON.stringify(body), { status: 422 }));
  render(<TrialCommands study="sweep-1" trial={TRIAL} />);
  await userEvent.click(screen.getByText("Start again…"));
  await userEvent.click(screen.getByText("Start it again"));
  expect(await screen.findByText("trial 7 has already finished")).toBeTruthy();
  expect(bodies()).toEqual([["/api/study/trial/requeue", { study: "sweep-1", number: 7 }]]);
});

test("a trial that has ended or has not started has no commands, a paused one can only be stopped", () => {
  const { rerender } = render(<TrialCommands study="s" trial={{ ...TRIAL, state: "finished" }} />);
  expect(screen.queryAllByRole("button")).toEqual([]);
  rerender(<TrialCommands study="s" trial={{ ...TRIAL, state: "queued", num_starts: 0 }} />);
  expect(screen.queryAllByRole("button")).toEqual([]);
  rerender(<TrialCommands study="s" trial={{ ...TRIAL, state: "paused" }} />);
  expect(screen.getAllByRole("button").map((each) => each.textContent)).toEqual(["Stop…"]);
});
