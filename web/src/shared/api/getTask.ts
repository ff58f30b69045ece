import { get } from "./client";
import type { VerifyTask } from "./types";

export function getTask(task: string, signal?: AbortSignal): Promise<VerifyTask> {
  return get(`/api/explorer/tasks/${encodeURIComponent(task)}`, {}, signal);
}
