import { get } from "./client";
import type { TreePage } from "./types";

export function getTree(query: { place: string; id: string; under?: string; offset: number }, signal?: AbortSignal): Promise<TreePage> {
  return get("/api/explorer/tree", { ...query, limit: 1000 }, signal);
}
