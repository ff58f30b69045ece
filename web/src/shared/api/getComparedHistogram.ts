import { get } from "./client";
import type { ComparedHistogram, TensorRef } from "./types";

type Query = TensorRef & { against_place: string; against: string };

export function getComparedHistogram(query: Query, signal?: AbortSignal): Promise<ComparedHistogram> {
  return get("/api/explorer/compare/histogram", { ...query, bins: 120 }, signal);
}
