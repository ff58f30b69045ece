import { get } from "./client";
import type { Page, StudyTrial } from "./types";

export interface TrialQuery {
  state: string;
  text: string;
  sort: string;
  /** The metric or the parameter to sort by. */
  name: string;
  desc: boolean;
  limit: number;
  offset: number;
}

/** Returns a page of the trials of a study. */
export function getTrials(study: string, query: TrialQuery, signal?: AbortSignal): Promise<Page<StudyTrial>> {
  return get("/api/study/trials", { study, ...query }, signal);
}
