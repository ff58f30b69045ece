import { post } from "./client";

/** Stops a trial for good; the order is in the journal then. */
export function postTrialStop(study: string, number: number): Promise<void> {
  return post("/api/study/trial/stop", { study, number });
}
