import { get } from "./client";
import type { StudyImportances } from "./types";

/** Returns how much each parameter matters for an objective. */
export function getImportances(study: string, metric: string, signal?: AbortSignal): Promise<StudyImportances> {
  return get("/api/study/importances", { study, metric }, signal);
}
