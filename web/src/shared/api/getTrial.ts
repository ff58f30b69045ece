import { get } from "./client";
import type { StudyTrial } from "./types";

/** Returns one trial; null if the study has none of this number. */
export function getTrial(study: string, number: number, signal?: AbortSignal): Promise<StudyTrial | null> {
  return get("/api/study/trial", { study, number }, signal);
}
