import { get } from "./client";
import type { Overview } from "./types";

/** The most jobs that the page keeps up to date; the command palette finds those that have workers first. */
export const MAX_JOBS = 100;

export function getOverview(signal?: AbortSignal): Promise<Overview> {
  return get("/api/overview", { limit: MAX_JOBS }, signal);
}
