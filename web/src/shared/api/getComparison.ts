import { get } from "./client";
import type { ComparedPage } from "./types";

export interface ComparisonQuery {
  place: string;
  id: string;
  against_place: string;
  against: string;
  search: string;
  offset: number;
}

export function getComparison(query: ComparisonQuery, signal?: AbortSignal): Promise<ComparedPage> {
  return get("/api/explorer/compare", { ...query, limit: 500 }, signal);
}
