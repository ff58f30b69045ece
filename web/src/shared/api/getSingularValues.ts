import { get } from "./client";
import type { SingularValues, TensorRef } from "./types";

export function getSingularValues(tensor: TensorRef, signal?: AbortSignal): Promise<SingularValues> {
  return get("/api/explorer/singular-values", { ...tensor }, signal);
}
