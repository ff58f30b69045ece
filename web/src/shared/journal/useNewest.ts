import { useEffect, useRef, useState } from "react";
import { ApiError } from "@/shared/api/client";
import { getEvents } from "@/shared/api/getEvents";
import type { EventLine } from "@/shared/api/types";
import { listen, useLive } from "@/shared/live/store";
import { findEnd, findMoment, type Read, readBack } from "./paging";

export interface EventFilter {
  job: string;
  kind: string;
  worker: string;
}

export interface Newest {
  /** Newest first. */
  events: EventLine[];
  /** The entry that the reader looks at: the one asked for, or the newest at or before the moment asked for. */
  at: number | undefined;
  hasOlder: boolean;
  isLoading: boolean;
  error: ApiError | undefined;
  loadOlder: () => void;
  reload: () => void;
}

/** What a reader looks at: an entry by its number, or a moment in seconds since 1970. */
export interface Place {
  seq?: number | undefined;
  atS?: number | undefined;
}

/** The most events that the page keeps. */
const MAX_KEPT = 20_000;

function matches(event: EventLine, filter: EventFilter): boolean {
  return (
    (filter.job === "" || event.job_id === filter.job) &&
    (filter.kind === "" || event.kind === filter.kind) &&
    (filter.worker === "" || event.worker_id === filter.worker)
  );
}

/** Events that match a filter, newest first: a page from the server, older ones on demand, newer ones as they happen.
 *
 * With a place, the first page ends a little after it, and nothing newer is added: the reader looks at a moment.
 */
export function useNewest(filter: EventFilter, pageSize: number, { seq, atS }: Place = {}): Newest {
  const { job, kind, worker } = filter;
  const epoch = useLive((state) => state.epoch);
  const [turn, setTurn] = useState(0);
  const [events, setEvents] = useState<EventLine[]>([]);
  const [found, setFound] = useState<number>();
  const [before, setBefore] = useState(0);
  const [isLoading, setLoading] = useState(true);
  const [error, setError] = useState<ApiError>();
  const [wanted, setWanted] = useState(0);
  const busy = useRef(false);

  useEffect(() => {
    const abort = new AbortController();
    const chosen = { job, kind, worker };
    const read: Read = (after, limit) => getEvents({ ...chosen, after, limit }, abort.signal);
    const readAll: Read = (after, limit) => getEvents({ after, limit }, abort.signal);
    const early: EventLine[] = [];
    let isLoaded = false;
    const stop =
      seq !== undefined || atS !== undefined
        ? () => undefined
        : listen("events", ({ items }) => {
            const fresh = items.filter((event) => matches(event, chosen)).reverse();
            if (!isLoaded) early.unshift(...fresh);
            else if (fresh.length > 0) setEvents((held) => merged(fresh, held));
          });
    const load = async (): Promise<void> => {
      const known = useLive.getState().recentEvents[0]?.seq ?? 0;
      const at = seq ?? (atS === undefined ? undefined : await findMoment(readAll, atS));
      const end = at === undefined ? await findEnd(readAll, known) : at + Math.floor(pageSize / 4);
      const page = await readBack(read, end + 1, pageSize);
      if (abort.signal.aborted) return;
      isLoaded = true;
      setFound(at);
      setEvents(merged(early, page.items));
      setBefore(page.before);
      setLoading(false);
    };
    busy.current = false;
    setEvents([]);
    setFound(undefined);
    setBefore(0);
    setLoading(true);
    setError(undefined);
    load().catch((reason: unknown) => {
      if (abort.signal.aborted) return;
      setError(reason instanceof ApiError ? reason : new ApiError(0, "", String(reason)));
      setLoading(false);
    });
    return () => {
      abort.abort();
      stop();
    };
  }, [job, kind, worker, seq, atS, pageSize, epoch, turn]);

  useEffect(() => {
    if (wanted === 0 || before === 0 || busy.current) return;
    busy.current = true;
    setLoading(true);
    const read: Read = (after, limit) => getEvents({ job, kind, worker, after, limit });
    readBack(read, before, pageSize)
      .then((page) => {
        setEvents((held) => (held.length >= MAX_KEPT ? held : [...held, ...page.items]));
        setBefore(page.before);
      })
      .catch((reason: unknown) => {
        setError(reason instanceof ApiError ? reason : new ApiError(0, "", String(reason)));
      })
      .finally(() => {
        busy.current = false;
        setLoading(false);
      });
    // Each request for older events is one page; `before` moves with it and must not start another.
    // eslint-disable-next-line react-hooks/exhaustive-deps
  }, [wanted]);

  return {
    events,
    at: found,
    hasOlder: before > 0 && events.length < MAX_KEPT,
    isLoading,
    error,
    loadOlder: () => {
      setWanted((count) => count + 1);
    },
    reload: () => {
      setTurn((count) => count + 1);
    },
  };
}

/** Returns two lists, newest first, as one without repetitions. */
export function merged(fresh: readonly EventLine[], held: readonly EventLine[]): EventLine[] {
  const newest = held[0]?.seq ?? 0;
  return [...fresh.filter((event) => event.seq > newest), ...held].slice(0, MAX_KEPT);
}
