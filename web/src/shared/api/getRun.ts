import { get } from "./client";
import type { RunInfo } from "./types";

/** Returns the run whose page this is; null on the page of a coordinator. */
export function getRun(signal?: AbortSignal): Promise<RunInfo | null> {
  return get("/api/run", {}, signal);
}
