import { post } from "./client";

/** Changes the number of workers of the run. */
export function postScale(workers: number): Promise<void> {
  return post("/api/run/scale", { workers });
}
