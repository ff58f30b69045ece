import { get } from "./client";
import type { JobTime } from "./types";

/** Workers of one answer. */
export const TIMED_WORKERS = 32;

export function getTime(job: string, offset: number, signal?: AbortSignal): Promise<JobTime> {
  return get("/api/time", { job, offset, limit: TIMED_WORKERS }, signal);
}
