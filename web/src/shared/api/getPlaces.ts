import { get } from "./client";
import type { Place } from "./types";

/** Returns the directories, buckets and files that the explorer may read. */
export async function getPlaces(signal?: AbortSignal): Promise<Place[]> {
  return (await get<{ items: Place[] }>("/api/explorer/places", {}, signal)).items;
}
