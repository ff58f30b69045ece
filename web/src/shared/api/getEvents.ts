import { get } from "./client";
import type { EventPage } from "./types";

export interface EventsQuery {
  job?: string;
  kind?: string;
  worker?: string;
  after: number;
  limit: number;
}

export function getEvents(query: EventsQuery, signal?: AbortSignal): Promise<EventPage> {
  return get("/api/events", { ...query }, signal);
}
