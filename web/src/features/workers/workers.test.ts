import { describe, expect, test } from "vitest";
import type { Worker } from "@/shared/api/types";
import { ageHeat, medianRate, NUM_CELLS, sample, type Strips } from "./strips";
import { filtered, rankOf, sorted } from "./table";

function worker(rank: number, fields: Partial<Worker> = {}): Worker {
  return {
    ...{ job_id: "j", worker_id: `w-${rank}`, rank, incarnation: 1, state: "TRAINING", step: 0, epoch: 0, capacity: 1 },
    ...{ hostname: "node", silent_s: 0.2, suspect: false, metrics: {}, launch_rank: rank, attempt: 0 },
    ...fields,
  } as Worker;
}

describe("strips", () => {
  test("the step rate is the difference of two samples", () => {
    const strips: Strips = new Map();
    sample(strips, [worker(0, { step: 10 })], 100);
    sample(strips, [worker(0, { step: 30 })], 104);
    expect(strips.get("w-0")?.cells.map((cell) => cell.stepsPerS)).toEqual([null, 5]);
  });

  test("a worker that resumed at an earlier step has no rate", () => {
    const strips: Strips = new Map();
    sample(strips, [worker(0, { step: 100 })], 1);
    sample(strips, [worker(0, { step: 90 })], 2);
    expect(strips.get("w-0")?.cells.at(-1)?.stepsPerS).toBeNull();
  });

  test("the steps that a restarted worker restores are not progress", () => {
    const strips: Strips = new Map();
    [100, 0, 90, 94].forEach((step, at) => {
      sample(strips, [worker(0, { step })], 2 * at);
    });
    expect(strips.get("w-0")?.cells.map((cell) => cell.stepsPerS)).toEqual([null, null, null, 2]);
  });

  test("strips are bounded, and workers that left are forgotten", () => {
    const strips: Strips = new Map();
    for (let at = 0; at < 500; at += 1) sample(strips, [worker(0), worker(1)], at);
    expect(strips.get("w-0")?.cells).toHaveLength(NUM_CELLS);
    sample(strips, [worker(1)], 501);
    expect([...strips.keys()]).toEqual(["w-1"]);
  });

  test("the median ignores workers without a rate", () => {
    const strips: Strips = new Map();
    sample(strips, [0, 1, 2].map((rank) => worker(rank, { step: 10 })), 0);
    sample(strips, [worker(0, { step: 11 }), worker(1, { step: 12 }), worker(2, { step: 19 }), worker(3)], 1);
    expect(medianRate(strips)).toBe(2);
    expect(medianRate(new Map())).toBeNull();
  });

  test("a rate is compared with the median of its own moment", () => {
    const strips: Strips = new Map();
    for (const [at, step] of [[0, 10], [10, 20], [20, 120]] as const) {
      sample(strips, [worker(0, { step }), worker(1, { step })], at);
    }
    const cells = strips.get("w-0")?.cells ?? [];
    expect(cells.map((cell) => cell.stepsPerS)).toEqual([null, 1, 10]);
    expect(cells.map((cell) => cell.medianPerS)).toEqual([null, 1, 10]);
  });

  test("a heartbeat is fresh for a second and cold after 16", () => {
    expect([0.3, 1, 4, 16, 99].map(ageHeat)).toEqual([0, 0, 0.5, 1, 1]);
  });
});

describe("the table", () => {
  const workers = [worker(0, { step: 5 }), worker(1, { step: 5, state: "ERROR" }), worker(2, { step: 9, suspect: true, hostname: "gpu-7" })];

  test("filters combine", () => {
    expect(filtered(workers, { text: "GPU", state: "", isSuspectOnly: true }).map((each) => each.rank)).toEqual([2]);
    expect(filtered(workers, { text: "", state: "ERROR", isSuspectOnly: false }).map((each) => each.rank)).toEqual([1]);
  });

  test("equal values keep the order of ranks in both directions", () => {
    expect(sorted(workers, "step", true).map((each) => each.rank)).toEqual([2, 0, 1]);
    expect(sorted(workers, "step", false).map((each) => each.rank)).toEqual([0, 1, 2]);
  });
});

test("workers are ordered by the rank that the launcher gave them, not by the order in which they joined", () => {
  const late = worker(0, { worker_id: "rank-1", launch_rank: 1 });
  const early = worker(1, { worker_id: "rank-0", launch_rank: 0 });
  expect(sorted([late, early], "rank", false).map(rankOf)).toEqual([0, 1]);
  expect(rankOf(worker(3, { launch_rank: null }))).toBe(3);
});
