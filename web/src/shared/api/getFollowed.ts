import { get } from "./client";
import type { FollowedPage } from "./types";

export function getFollowed(query: { place: string; name: string }, signal?: AbortSignal): Promise<FollowedPage> {
  return get("/api/explorer/follow", { ...query, limit: 1000 }, signal);
}
