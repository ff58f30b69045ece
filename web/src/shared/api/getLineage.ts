import { get } from "./client";
import type { JobLineage } from "./types";

export function getLineage(job: string, signal?: AbortSignal): Promise<JobLineage> {
  return get("/api/lineage", { job, limit: 200 }, signal);
}
