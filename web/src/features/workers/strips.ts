/** The recent past of each worker, sampled while the page is open: state, step rate and heartbeat age. */
import type { Worker, WorkerState } from "@/shared/api/types";

export const NUM_CELLS = 60;

export interface Cell {
  state: WorkerState;
  isSuspect: boolean;
  silentS: number;
  /** Steps per second over the last samples; null for the first one and after a restart. */
  stepsPerS: number | null;
  /** The median of all workers' rates at the same moment. */
  medianPerS: number | null;
}

export interface Strip {
  cells: Cell[];
  /** The newest samples of the step, oldest first. */
  marks: { atS: number; step: number }[];
}

/** A worker reports its step about once a second, so a rate over a shorter time would mostly show when it reported. */
const RATE_S = 6;

export type Strips = Map<string, Strip>;

/** Adds a sample of all workers in place, and forgets those that left. */
export function sample(strips: Strips, workers: readonly Worker[], atS: number): void {
  const present = new Set<string>();
  for (const worker of workers) {
    present.add(worker.worker_id);
    const strip: Strip = strips.get(worker.worker_id) ?? { cells: [], marks: [] };
    const newest = strip.marks.at(-1);
    if (newest !== undefined && worker.step < newest.step) strip.marks = []; // it resumed at an earlier step
    while (strip.marks.length > 1 && atS - (strip.marks[1]?.atS ?? atS) >= RATE_S) strip.marks.shift();
    const oldest = strip.marks[0];
    strip.cells.push({
      state: worker.state,
      isSuspect: worker.suspect,
      silentS: worker.silent_s,
      stepsPerS: oldest !== undefined && atS > oldest.atS ? (worker.step - oldest.step) / (atS - oldest.atS) : null,
      medianPerS: null,
    });
    if (strip.cells.length > NUM_CELLS) strip.cells.shift();
    // A process is at step 0 until its first report; the steps that it restores are not progress.
    if (worker.step > 0) strip.marks.push({ atS, step: worker.step });
    strips.set(worker.worker_id, strip);
  }
  for (const worker of strips.keys()) if (!present.has(worker)) strips.delete(worker);
  const median = medianRate(strips);
  for (const { cells } of strips.values()) {
    const newest = cells.at(-1);
    if (newest !== undefined) newest.medianPerS = median;
  }
}

/** Returns the median of the workers' newest step rates; null if none has one. */
export function medianRate(strips: Strips): number | null {
  const rates = [...strips.values()].flatMap((strip) => strip.cells.at(-1)?.stepsPerS ?? []).sort((a, b) => a - b);
  if (rates.length === 0) return null;
  const middle = Math.floor(rates.length / 2);
  const upper = rates[middle] ?? 0;
  return rates.length % 2 === 1 ? upper : (upper + (rates[middle - 1] ?? upper)) / 2;
}

/** Returns how worrying a heartbeat's age is, from 0 (fresh) to 1; each doubling beyond a second counts the same. */
export function ageHeat(silentS: number): number {
  const OLDEST_S = 16;
  return Math.min(Math.max(Math.log2(Math.max(silentS, 1)) / Math.log2(OLDEST_S), 0), 1);
}
