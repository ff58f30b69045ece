import { get } from "./client";
import type { StudyCurves } from "./types";

/** Returns the reports of trials over their steps: of the chosen one, then of running ones, then of the best. */
export function getCurves(
  study: string,
  metric: string,
  trial: number | undefined,
  signal?: AbortSignal,
): Promise<StudyCurves> {
  return get("/api/study/curves", { study, metric, trial }, signal);
}
