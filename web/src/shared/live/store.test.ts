import { expect, test, vi } from "vitest";
import type { EventLine, JobSummary, Overview } from "@/shared/api/types";
import { EMPTY, listen, receive, withMessage, withOverview } from "./store";

const health = { level: "ok" as const, line: "all workers report", findings: [], num_findings: 0 };

function job(job_id: string, step: number): JobSummary {
  return {
    ...{ job_id, step, state: "training", generation: 1, reason: "", attempt: null, num_workers: 1, num_servers: 0 },
    ...{ num_suspects: 0, workers_by_state: { TRAINING: 1 }, epoch: 0, data_fraction: null, steps_per_s: null },
    ...{ rows_per_s: null, checkpoint_id: null, checkpoint_step: null },
    ...{ checkpoint_age_s: null, health },
  } as JobSummary;
}

function event(seq: number): EventLine {
  return { seq, at_s: seq, at: "", job_id: "a", kind: "WorkerJoined", words: "", reason: null, worker_id: null, generation: null };
}

const figures = {
  ...{ at_s: 5, requests_per_s: 1, barrier_p50_s: null, barrier_p99_s: null, num_sessions: 1, num_jobs: 1 },
  ...{ num_workers: 1, num_suspects: 0, workers_by_state: {} },
};

const overview: Overview = {
  ...figures,
  cursor: "c-1",
  ended: null,
  version: "1",
  health,
  jobs: { items: [{ ...job("a", 1), values: {}, num_values: 0 }], total: 1, limit: 100, offset: 0, next_offset: null },
};

test("a changed job replaces its summary, and a new one comes first", () => {
  let state = withOverview(EMPTY, overview);
  state = withMessage(state, "job", { at_s: 6, job: job("a", 2) });
  state = withMessage(state, "job", { at_s: 7, job: job("b", 1) });
  expect(state.jobs.map((each) => [each.job_id, each.step])).toEqual([["b", 1], ["a", 2]]);
  expect(state.atS).toBe(7);
  expect(withMessage(state, "gone", { at_s: 8, job_id: "b" }).jobs).toHaveLength(1);
});

test("a fresh overview raises the epoch, so that charts load again", () => {
  const once = withOverview(EMPTY, overview);
  expect(withOverview(once, overview).epoch).toBe(once.epoch + 1);
});

test("events arrive newest first, without repetitions and bounded", () => {
  let state = withMessage(EMPTY, "events", { items: [event(1), event(2)], is_complete: true });
  state = withMessage(state, "events", { items: [event(2), event(3)], is_complete: true });
  expect(state.recentEvents.map((each) => each.seq)).toEqual([3, 2, 1]);
  const many = Array.from({ length: 500 }, (_, index) => event(index + 4));
  expect(withMessage(state, "events", { items: many, is_complete: true }).recentEvents).toHaveLength(200);
});

test("points go to the listeners and leave the state alone", () => {
  const points = { at_s: 1, job_id: "a", values: { step: [1, 2, 3] as [number, number, number] } };
  const heard = vi.fn();
  const stop = listen("points", heard);
  receive("points", points);
  stop();
  receive("points", points);
  expect(heard).toHaveBeenCalledTimes(1);
  expect(withMessage(EMPTY, "points", points)).toBe(EMPTY);
});
