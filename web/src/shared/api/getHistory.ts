import { get } from "./client";
import type { History } from "./types";

export interface HistoryQuery {
  /** Empty for the coordinator's own series. */
  job: string;
  names: readonly string[];
  sinceS: number;
  untilS?: number | undefined;
  maxPoints: number;
}

export function getHistory(query: HistoryQuery, signal?: AbortSignal): Promise<History> {
  const { job, names, sinceS, untilS, maxPoints } = query;
  return get("/api/history", { job, name: names, since_s: sinceS, until_s: untilS, max_points: maxPoints }, signal);
}
