import { post } from "./client";

/** Stops the run: after a checkpoint, or at once. */
export function postStop(isNow: boolean): Promise<void> {
  return post("/api/run/stop", { is_now: isNow });
}
