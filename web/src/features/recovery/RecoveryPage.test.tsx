import { render, screen } from "@testing-library/react";
import { afterEach, expect, test, vi } from "vitest";
import type { Recoveries, RunRecovery } from "@/shared/api/types";
import RecoveryPage from "./RecoveryPage";

const KILLED: RunRecovery = {
  ...{ failed_attempt: 0, attempt: 1, rank: 1, cause: "rank 1: killed by SIGKILL", generation: 3 },
  ...{ step: 500, first_step: 501, took_s: 1.25, last_lines: ["epoch 0 step 520", "<b>bold</b>"] },
  moments: [
    { name: "detected", at_s: 100, after_s: 0 },
    { name: "generation", at_s: 100.5, after_s: 0.5 },
    { name: "started", at_s: 100.25, after_s: 0.25 },
    { name: "loaded", at_s: null, after_s: null },
    { name: "first_step", at_s: 101.25, after_s: 1.25 },
  ],
};

function serve(answer: Partial<Recoveries>): void {
  window.history.replaceState(null, "", "/recovery?job=flights");
  const found: Recoveries = { job_id: "flights", is_recorded: true, items: [], num_recoveries: 0, ...answer };
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(JSON.stringify(found))));
}

afterEach(() => {
  vi.unstubAllGlobals();
});

test("the moments of a failure stand in the order in which they happened", async () => {
  serve({ items: [KILLED], num_recoveries: 1 });
  render(<RecoveryPage />);

  expect(await screen.findByRole("heading", { name: KILLED.cause })).toBeTruthy();
  const labels = screen.getAllByRole("listitem").map((each) => each.querySelector(".strong")?.textContent);
  expect(labels).toEqual(["Failure detected", "Workers started", "New generation", "First step"]);
  expect(screen.getByText("Not seen: checkpoint loaded.")).toBeTruthy();
  expect(screen.getByText("step 501")).toBeTruthy();
  expect(screen.getByText("took 750 ms")).toBeTruthy();
  const link = screen.getByRole("link", { name: "+500 ms" });
  expect(link.getAttribute("href")).toBe("/events?job=flights&time=100.500");
});

test("the last lines of the worker are shown as text", async () => {
  serve({ items: [KILLED], num_recoveries: 1 });
  const { container } = render(<RecoveryPage />);

  await screen.findByText("Last lines of rank 1");
  expect(container.querySelector("pre")?.textContent).toBe("epoch 0 step 520\n<b>bold</b>");
});

test("a run without failures and a job without a timeline are told apart", async () => {
  serve({});
  const { unmount } = render(<RecoveryPage />);
  expect(await screen.findByRole("heading", { name: "No failures" })).toBeTruthy();
  unmount();

  serve({ is_recorded: false });
  render(<RecoveryPage />);
  expect(await screen.findByRole("heading", { name: "No timeline of this job" })).toBeTruthy();
});
