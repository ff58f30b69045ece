import { get } from "./client";
import type { StudyHistory } from "./types";

/** Returns the results of a study in the order in which trials ended, and each improvement. */
export function getStudyHistory(study: string, metric: string, signal?: AbortSignal): Promise<StudyHistory> {
  return get("/api/study/history", { study, metric }, signal);
}
