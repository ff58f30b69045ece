import { post } from "./client";
import type { VerifyTask } from "./types";

/** Starts to read and check every byte of a checkpoint. */
export function postVerify(place: string, id: string): Promise<VerifyTask> {
  return post("/api/explorer/verify", { place, id });
}
