import { ApiError, get } from "./client";
import type { SessionInfo } from "./types";

/** Returns who is asking; null where there is no login, as with `strata dashboard DIR`. */
export async function getSession(): Promise<SessionInfo | null> {
  try {
    return await get<SessionInfo>("/api/session");
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}
