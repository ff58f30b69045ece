import { get } from "./client";
import type { Tensor, TensorRef } from "./types";

export function getStatistics(tensor: TensorRef, signal?: AbortSignal): Promise<Tensor> {
  return get("/api/explorer/statistics", { ...tensor }, signal);
}
