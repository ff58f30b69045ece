import { get } from "./client";
import type { JobData } from "./types";

/** Owners of one answer. */
export const OWNERS = 50;

export function getData(job: string, dataset: string, offset: number, signal?: AbortSignal): Promise<JobData> {
  return get("/api/data", { job, dataset, offset, limit: OWNERS }, signal);
}
