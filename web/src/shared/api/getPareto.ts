import { get } from "./client";
import type { StudyPareto } from "./types";

/** Returns two metrics of finished trials, and which of them are on the Pareto front. */
export function getPareto(study: string, x: string, y: string, signal?: AbortSignal): Promise<StudyPareto> {
  return get("/api/study/pareto", { study, x, y }, signal);
}
