import { expect, test } from "vitest";
import type { WorkerTime } from "@/shared/api/types";
import { newest, words } from "./time";

const worker = (computing: number[], waiting: number[], blocked: number[]): WorkerTime => ({
  ...{ worker_id: "w", rank: 0, incarnation: 1, is_collective_known: false },
  ended_at_s: computing.map((_, index) => index),
  ...{ computing, waiting, blocked },
});

test("the words are those of the newest report", () => {
  expect(words(worker([1, 0.5], [0, 0.3], [0, 0.2]))).toBe("busy 50 %, waiting 30 %, blocked 20 %");
});

test("a worker that measured nothing has no shares", () => {
  expect(newest(worker([], [], []))).toBeNull();
  expect(words(worker([], [], []))).toBe("not measured yet");
});
