import { cleanup, render, screen } from "@testing-library/react";
import { afterEach, expect, test, vi } from "vitest";
import type { RunEnd, RunInfo } from "@/shared/api/types";
import { EMPTY, useLive } from "@/shared/live/store";
import { EndedNotice } from "./EndedNotice";

const ENDED: RunEnd = {
  ...{ state: "done", reason: "", began_at_s: 1_000, ended_at_s: 1_060, step: 60, num_restarts: 1 },
  ...{ log_ranks: [0, 1], missing: [] },
};
const RUN: RunInfo = { name: "job", min_workers: 1, max_workers: 2, num_workers: 2, may_command: false, live_page: null };

function serve(run: RunInfo): void {
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(JSON.stringify(run))));
}

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
  useLive.setState(EMPTY, true);
});

test("what the directory of an ended run lacks is named", async () => {
  serve(RUN);
  useLive.setState({ ended: { ...ENDED, missing: ["logs: there are none", "charts: no history"] } });
  render(<EndedNotice />);

  expect((await screen.findByRole("status")).textContent).toBe("Missing: logs: there are none; charts: no history.");
});

test("a run that was resumed leads to its live page", async () => {
  serve({ ...RUN, live_page: "http://127.0.0.1:4321" });
  useLive.setState({ ended: ENDED });
  render(<EndedNotice />);

  expect((await screen.findByRole("link", { name: "its live page" })).getAttribute("href")).toBe("http://127.0.0.1:4321");
});

test("an active run has no notice", () => {
  serve(RUN);
  render(<EndedNotice />);

  expect(screen.queryByRole("status")).toBeNull();
});
