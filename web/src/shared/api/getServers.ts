import { get } from "./client";
import type { JobServers } from "./types";

export function getServers(job: string, signal?: AbortSignal): Promise<JobServers> {
  return get("/api/servers", { job, limit: 200 }, signal);
}
