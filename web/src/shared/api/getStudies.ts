import { get } from "./client";
import type { StudyRef } from "./types";

/** Returns the studies of this server: none on the page of a run or of a coordinator. */
export async function getStudies(signal?: AbortSignal): Promise<StudyRef[]> {
  return (await get<{ items: StudyRef[] }>("/api/studies", {}, signal)).items;
}
