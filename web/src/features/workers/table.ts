/** Filters and order of the worker table. */
import type { Worker } from "@/shared/api/types";
import { WORKER_STATES } from "@/shared/ui/Status";

export const SORTS = ["rank", "worker", "host", "state", "silent", "step"] as const;
export type Sort = (typeof SORTS)[number];

export interface Filter {
  text: string;
  state: string;
  isSuspectOnly: boolean;
}

export function filtered(workers: readonly Worker[], filter: Filter): Worker[] {
  const text = filter.text.toLowerCase();
  return workers.filter(
    (worker) =>
      (filter.state === "" || worker.state === filter.state) &&
      (!filter.isSuspectOnly || worker.suspect) &&
      (text === "" || worker.worker_id.toLowerCase().includes(text) || worker.hostname.toLowerCase().includes(text)),
  );
}

/** Returns the rank that the script sees; the coordinator's own is the order in which workers joined. */
export function rankOf(worker: Worker): number {
  return worker.launch_rank ?? worker.rank;
}

const COMPARE: Record<Sort, (a: Worker, b: Worker) => number> = {
  rank: (a, b) => rankOf(a) - rankOf(b),
  worker: (a, b) => a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }),
  host: (a, b) => a.hostname.localeCompare(b.hostname, "en", { numeric: true }),
  state: (a, b) => WORKER_STATES.indexOf(a.state) - WORKER_STATES.indexOf(b.state),
  silent: (a, b) => a.silent_s - b.silent_s,
  step: (a, b) => a.step - b.step,
};

/** Returns the workers in an order; equal ones by rank, so that rows do not jump. */
export function sorted(workers: readonly Worker[], sort: Sort, isDescending: boolean): Worker[] {
  const sign = isDescending ? -1 : 1;
  return workers.slice().sort((a, b) => sign * COMPARE[sort](a, b) || rankOf(a) - rankOf(b));
}
