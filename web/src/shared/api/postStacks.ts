import { post } from "./client";

/** Writes the stacks of a worker's threads to its log; the worker continues. */
export function postStacks(rank: number): Promise<void> {
  return post("/api/run/stacks", { rank });
}
