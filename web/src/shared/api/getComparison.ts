import { get } from "./client";
import type { ComparedPage } from "./types";

export function getComparison(query: { place: string; id: string; against: string; search: string; offset: number }, signal?: AbortSignal): Promise<ComparedPage> {
  return get("/api/explorer/compare", { ...query, limit: 500 }, signal);
}
