import { get } from "./client";
import type { StudyInfo } from "./types";

/** Returns a study as its journal has it now. */
export function getStudy(study: string, signal?: AbortSignal): Promise<StudyInfo> {
  return get("/api/study", { study }, signal);
}
