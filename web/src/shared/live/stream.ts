/** The live stream: server-sent events from a cursor, reopened after failures with growing pauses.
 *
 * `EventSource` reconnects by itself after a lost connection, but gives up for good when the server answers an error. The
 * stream is therefore closed on every error and opened again here, from the last cursor.
 */
import type { LiveEvents } from "@/shared/api/types";

export type LiveName = keyof LiveEvents;
export const LIVE_NAMES: readonly LiveName[] = [
  ...(["hello", "reset", "health", "coordinator", "job", "gone", "workers", "points", "events"] as const),
];

export type Connection = "connecting" | "live" | "reconnecting" | "paused";

export interface StreamOptions {
  cursor: string;
  on: <Name extends LiveName>(name: Name, data: LiveEvents[Name]) => void;
  onConnection: (state: Connection, retryInS: number) => void;
  /** Called before the stream is opened again after an error, to notice an expired login. */
  onRetry?: () => void;
  open?: (url: string) => EventSource;
}

const FIRST_PAUSE_S = 0.5;
const LONGEST_PAUSE_S = 15;
/** Something arrives each second; a silent connection is a dead one. */
const SILENCE_S = 20;

/** Returns the pause before the next attempt, given the number of failures in a row. */
export function pauseS(numFailures: number): number {
  return Math.min(FIRST_PAUSE_S * 2 ** Math.max(numFailures - 1, 0), LONGEST_PAUSE_S);
}

export function openStream(options: StreamOptions): () => void {
  const open = options.open ?? ((url: string) => new EventSource(url));
  let cursor = options.cursor;
  let source: EventSource | undefined;
  let numFailures = 0;
  let retry: number | undefined;
  let watchdog: number | undefined;
  let isClosed = false;

  const fail = (): void => {
    source?.close();
    source = undefined;
    window.clearTimeout(watchdog);
    if (isClosed) return;
    numFailures += 1;
    const wait = pauseS(numFailures);
    options.onConnection("reconnecting", wait);
    window.clearTimeout(retry);
    retry = window.setTimeout(() => {
      options.onRetry?.();
      start();
    }, wait * 1000);
  };

  const alive = (): void => {
    window.clearTimeout(watchdog);
    watchdog = window.setTimeout(fail, SILENCE_S * 1000);
  };

  const start = (): void => {
    if (isClosed) return;
    const opened = open(cursor === "" ? "/api/live" : `/api/live?cursor=${encodeURIComponent(cursor)}`);
    source = opened;
    alive();
    for (const name of LIVE_NAMES) {
      opened.addEventListener(name, (message: MessageEvent<string>) => {
        if (isClosed || source !== opened) return;
        alive();
        if (message.lastEventId !== "") cursor = message.lastEventId;
        if (numFailures > 0 || name === "hello") options.onConnection("live", 0);
        numFailures = 0;
        options.on(name, JSON.parse(message.data) as LiveEvents[typeof name]);
      });
    }
    opened.onerror = () => {
      if (source === opened) fail();
    };
  };

  options.onConnection("connecting", 0);
  start();
  return () => {
    isClosed = true;
    source?.close();
    window.clearTimeout(retry);
    window.clearTimeout(watchdog);
  };
}
