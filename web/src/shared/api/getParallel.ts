import { get } from "./client";
import type { StudyParallel } from "./types";

/** Returns finished trials as lines through their parameters. */
export function getParallel(
  study: string,
  metric: string,
  trial: number | undefined,
  signal?: AbortSignal,
): Promise<StudyParallel> {
  return get("/api/study/parallel", { study, metric, trial }, signal);
}
