import { get } from "./client";
import type { TensorHistogram, TensorRef } from "./types";

export function getHistogram(query: TensorRef & { low?: number | undefined; high?: number | undefined }, signal?: AbortSignal): Promise<TensorHistogram> {
  return get("/api/explorer/histogram", { ...query, bins: 120 }, signal);
}
