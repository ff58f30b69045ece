import { get } from "./client";
import type { TensorHeatMap, TensorRef } from "./types";

export function getHeatMap(tensor: TensorRef, signal?: AbortSignal): Promise<TensorHeatMap> {
  return get("/api/explorer/heatmap", { ...tensor, rows: 128, columns: 256 }, signal);
}
