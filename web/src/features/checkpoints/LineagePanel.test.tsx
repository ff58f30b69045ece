import { render, screen, within } from "@testing-library/react";
import { afterEach, expect, test, vi } from "vitest";
import type { CheckpointLine, StoredCheckpoint } from "@/shared/api/types";
import { LineagePanel } from "./LineagePanel";

const LINE: CheckpointLine = {
  ...{ checkpoint_id: "c1", type: "FULL", step: 40, epoch: 0, size_bytes: 2_048, generation: 1, num_ranks: 2 },
  ...{ committed_at_s: 1_000, attempt: 0 },
  resumed_by: [
    { attempt: 1, at_s: 1_200.25 },
    { attempt: 3, at_s: 1_400 },
  ],
};
const STORED = { id: "c1", parent: "", duration_s: 1.5, stall_s: 0.025 } as StoredCheckpoint;

function serve(...items: CheckpointLine[]): void {
  window.history.replaceState(null, "", "/checkpoints?job=flights");
  const checkpoints = { items, total: items.length, limit: 100, offset: 0, next_offset: null };
  const answer = JSON.stringify({ job_id: "flights", is_recorded: true, checkpoints });
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(answer)));
}

afterEach(() => {
  vi.unstubAllGlobals();
});

test("a commit has its attempt, who resumed from it, and how long it blocked training", async () => {
  serve(LINE);
  render(<LineagePanel job="flights" stored={[STORED]} />);

  const row = (await screen.findByText("c1")).closest("tr");
  expect(row).not.toBeNull();
  const cells = within(row as HTMLElement).getAllByRole("cell");
  const words = cells.map((each) => each.textContent);
  expect([...words.slice(0, 5), ...words.slice(6)]).toEqual([
    ...["40", "full", "2 KiB", "1.5 s", "25 ms", "attempt 0", "attempt 1, attempt 3", "c1"],
  ]);
});

test("each attempt that resumed leads to the events of that moment", async () => {
  serve(LINE);
  render(<LineagePanel job="flights" stored={[]} />);

  const link = await screen.findByRole("link", { name: "attempt 1" });
  expect(link.getAttribute("href")).toBe("/events?job=flights&time=1200.250");
});
