import { get } from "./client";
import type { StoredCheckpointPage } from "./types";

export function getStoredCheckpoints(place: string, signal?: AbortSignal): Promise<StoredCheckpointPage> {
  return get("/api/explorer/checkpoints", { place, order: "newest", limit: 1000 }, signal);
}
