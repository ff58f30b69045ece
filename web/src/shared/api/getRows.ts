import { get } from "./client";
import type { TensorRef, TensorRows } from "./types";

export function getRows(tensor: TensorRef, signal?: AbortSignal): Promise<TensorRows> {
  return get("/api/explorer/rows", { ...tensor, points: 400 }, signal);
}
