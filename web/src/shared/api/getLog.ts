import { get } from "./client";
import type { WorkerLog } from "./types";

/** Returns the end of a worker's log, of the newest attempt by default. */
export function getLog(rank: number, attempt: number | undefined, signal?: AbortSignal): Promise<WorkerLog> {
  return get("/api/run/log", { rank, attempt, lines: 500 }, signal);
}
