import { get } from "./client";
import type { Page, SeriesInfo } from "./types";

export function getSeries(job: string, signal?: AbortSignal): Promise<Page<SeriesInfo>> {
  return get("/api/series", { job, limit: 200 }, signal);
}
