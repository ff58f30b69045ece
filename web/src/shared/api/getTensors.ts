import { get } from "./client";
import type { TensorPage } from "./types";

export interface TensorsQuery {
  place: string;
  id: string;
  search: string;
  property: string;
  sort: string;
  offset: number;
}

/** Finds tensors by name and property; may answer before the scan is complete. */
export function getTensors(query: TensorsQuery, signal?: AbortSignal): Promise<TensorPage> {
  const isDescending = query.sort !== "" && query.sort !== "order" && query.sort !== "name";
  return get("/api/explorer/tensors", { ...query, descending: isDescending, limit: 500 }, signal);
}
