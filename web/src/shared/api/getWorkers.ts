import { get } from "./client";
import type { Page, Worker } from "./types";

/** The most workers of one answer. */
export const MAX_WORKERS = 1_000;

export function getWorkers(job: string, offset: number, signal?: AbortSignal): Promise<Page<Worker>> {
  return get("/api/workers", { job, limit: MAX_WORKERS, offset }, signal);
}
