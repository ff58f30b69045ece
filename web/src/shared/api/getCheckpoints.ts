import { get } from "./client";
import type { Checkpoint, Page } from "./types";

export function getCheckpoints(job: string, signal?: AbortSignal): Promise<Page<Checkpoint>> {
  return get("/api/checkpoints", { job, limit: 1000 }, signal);
}
