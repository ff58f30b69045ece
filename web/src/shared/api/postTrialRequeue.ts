import { post } from "./client";

/** Lets a running trial save and start again from its checkpoint; the order is in the journal then. */
export function postTrialRequeue(study: string, number: number): Promise<void> {
  return post("/api/study/trial/requeue", { study, number });
}
