/** The newest shares of a worker's time, and the words for them. */
import type { WorkerTime } from "@/shared/api/types";
import { percent } from "@/shared/format/numbers";

export interface Shares {
  computing: number;
  waiting: number;
  blocked: number;
}

/** Returns the shares of the newest report; null if the worker has measured nothing yet. */
export function newest(worker: WorkerTime): Shares | null {
  const [computing, waiting, blocked] = [worker.computing.at(-1), worker.waiting.at(-1), worker.blocked.at(-1)];
  if (computing === undefined || waiting === undefined || blocked === undefined) return null;
  return { computing, waiting, blocked };
}

export function words(worker: WorkerTime): string {
  const shares = newest(worker);
  if (shares === null) return "not measured yet";
  return `busy ${percent(shares.computing)}, waiting ${percent(shares.waiting)}, blocked ${percent(shares.blocked)}`;
}
