import { get } from "./client";
import type { Goodput } from "./types";

export function getGoodput(job: string, signal?: AbortSignal): Promise<Goodput> {
  return get("/api/goodput", { job }, signal);
}
