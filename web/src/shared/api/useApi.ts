import { useCallback, useEffect, useRef, useState } from "react";
import { ApiError } from "./client";

export interface Loaded<T> {
  data: T | undefined;
  error: ApiError | undefined;
  isLoading: boolean;
  reload: () => void;
}

interface Options {
  /** Seconds between two loads; 0 loads once. Nothing is loaded while the page is hidden. */
  everyS?: number;
  /** Whether the data of another key is shown until the new data arrives. */
  keep?: boolean;
  enabled?: boolean;
}

interface Held<T> {
  key: string;
  data: T | undefined;
  error: ApiError | undefined;
  isLoading: boolean;
}

/** Loads data for a key, again if the key changes; a late answer for an old key is dropped. */
export function useApi<T>(key: string, load: (signal: AbortSignal) => Promise<T>, options: Options = {}): Loaded<T> {
  const { everyS = 0, keep = false, enabled = true } = options;
  const [held, setHeld] = useState<Held<T>>({ key, data: undefined, error: undefined, isLoading: enabled });
  const [turn, setTurn] = useState(0);
  const loadRef = useRef(load);
  loadRef.current = load;

  useEffect(() => {
    if (!enabled) return undefined;
    const abort = new AbortController();
    let timer: number | undefined;
    const again = (): void => {
      if (everyS > 0) timer = window.setTimeout(run, everyS * 1000);
    };
    const run = (): void => {
      if (document.hidden && everyS > 0) {
        again();
        return;
      }
      loadRef.current(abort.signal).then(
        (data) => {
          if (abort.signal.aborted) return;
          setHeld({ key, data, error: undefined, isLoading: false });
          again();
        },
        (reason: unknown) => {
          if (abort.signal.aborted) return;
          const error = reason instanceof ApiError ? reason : new ApiError(0, "", String(reason));
          setHeld((before) => ({ key, data: before.key === key ? before.data : undefined, error, isLoading: false }));
          again();
        },
      );
    };
    setHeld((before) => ({
      key,
      data: before.key === key || keep ? before.data : undefined,
      error: undefined,
      isLoading: true,
    }));
    run();
    return () => {
      abort.abort();
      window.clearTimeout(timer);
    };
  }, [key, everyS, keep, enabled, turn]);

  const reload = useCallback(() => {
    setTurn((before) => before + 1);
  }, []);
  const isCurrent = held.key === key;
  return {
    data: isCurrent || keep ? held.data : undefined,
    error: isCurrent ? held.error : undefined,
    isLoading: isCurrent ? held.isLoading : enabled,
    reload,
  };
}
