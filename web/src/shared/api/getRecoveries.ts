import { get } from "./client";
import type { Recoveries } from "./types";

export function getRecoveries(job: string, signal?: AbortSignal): Promise<Recoveries> {
  return get("/api/recoveries", { job }, signal);
}
