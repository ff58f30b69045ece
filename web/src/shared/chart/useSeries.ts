import { useEffect, useRef, useState } from "react";
import { ApiError } from "@/shared/api/client";
import { getHistory } from "@/shared/api/getHistory";
import type { Points } from "@/shared/api/types";
import { listen, useLive } from "@/shared/live/store";
import { append, fromHistory, type Series } from "./series";

const MAX_POINTS = 500;
/** Live points kept while the history is being loaded. */
const MAX_PENDING = 60;

export interface Shown {
  series: ReadonlyMap<string, Series>;
  version: number;
  error: ApiError | undefined;
  isLoading: boolean;
}

interface Query {
  job: string;
  names: readonly string[];
  windowS: number;
  /** A zoomed chart does not follow the live points. */
  from?: number | undefined;
  to?: number | undefined;
  /** Seconds by which the series are moved on the time axis, to compare runs that began at different times. */
  shiftS?: number;
}

/** Loads the history of series and extends it with live points. */
export function useSeries({ job, names, windowS, from, to, shiftS = 0 }: Query): Shown {
  const epoch = useLive((state) => state.epoch);
  const [shown, setShown] = useState<Shown>({ series: new Map(), version: 0, error: undefined, isLoading: true });
  const version = useRef(0);
  const key = names.join("\n");

  useEffect(() => {
    const wanted = key === "" ? [] : key.split("\n");
    if (wanted.length === 0) {
      setShown({ series: new Map(), version: 0, error: undefined, isLoading: false });
      return undefined;
    }
    const abort = new AbortController();
    let series: Map<string, Series> | undefined;
    const pending: Points[] = [];
    const add = (points: Points): void => {
      if (series === undefined) {
        pending.push(points);
        if (pending.length > MAX_PENDING) pending.shift();
        return;
      }
      for (const [name, each] of series) {
        const spread = points.values[name];
        if (spread !== undefined) {
          append(each, points.at_s + shiftS, spread as [number, number, number], windowS + Math.abs(shiftS));
        }
      }
    };
    const publish = (): void => {
      if (series === undefined) return;
      version.current += 1;
      setShown({ series, version: version.current, error: undefined, isLoading: false });
    };
    const stop =
      from !== undefined
        ? () => undefined
        : listen("points", (points) => {
            if (points.job_id !== job) return;
            add(points);
            publish();
          });
    const sinceS = (from ?? Date.now() / 1000 - windowS) - shiftS;
    const untilS = to === undefined ? undefined : to - shiftS;
    getHistory({ job, names: wanted, sinceS, untilS, maxPoints: MAX_POINTS }, abort.signal).then(
      (history) => {
        series = new Map(history.series.map((each) => [each.name, fromHistory(each, shiftS)]));
        pending.forEach(add);
        publish();
      },
      (reason: unknown) => {
        if (abort.signal.aborted) return;
        const error = reason instanceof ApiError ? reason : new ApiError(0, "", String(reason));
        setShown((before) => ({ ...before, error, isLoading: false }));
      },
    );
    return () => {
      abort.abort();
      stop();
    };
  }, [job, key, windowS, from, to, shiftS, epoch]);

  return shown;
}
