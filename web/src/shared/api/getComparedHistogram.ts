import { get } from "./client";
import type { ComparedHistogram, TensorRef } from "./types";

export function getComparedHistogram(query: TensorRef & { against: string }, signal?: AbortSignal): Promise<ComparedHistogram> {
  return get("/api/explorer/compare/histogram", { ...query, bins: 120 }, signal);
}
