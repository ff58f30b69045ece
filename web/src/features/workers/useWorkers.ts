import { useCallback, useEffect, useRef, useState } from "react";
import { ApiError } from "@/shared/api/client";
import { getWorkers, MAX_WORKERS } from "@/shared/api/getWorkers";
import type { Worker, WorkersChanged } from "@/shared/api/types";
import { listen, useLive } from "@/shared/live/store";
import { sample, type Strips } from "./strips";

const EVERY_S = 2;
/** Many workers are a large answer, so the page asks for them less often. */
const MANY = 300;
const EVERY_MANY_S = 5;
/** The most workers that the page shows. */
const MAX_SHOWN = 10 * MAX_WORKERS;

export interface Sampled {
  workers: Worker[] | undefined;
  strips: Strips;
  everyS: number;
  version: number;
  error: ApiError | undefined;
  reload: () => void;
}

async function all(job: string, signal: AbortSignal): Promise<Worker[]> {
  const found: Worker[] = [];
  for (let offset: number | null = 0; offset !== null && offset < MAX_SHOWN; ) {
    const page = await getWorkers(job, offset, signal);
    found.push(...page.items);
    offset = page.next_offset;
  }
  return found;
}

/** Returns the workers after a live message, and whether it names one that is not known yet. */
export function changed(workers: readonly Worker[], message: WorkersChanged): { workers: Worker[]; isStale: boolean } {
  const gone = new Set(message.gone);
  const news = new Map(message.changed.map((each) => [each.worker_id, each]));
  const kept = workers.filter((worker) => !gone.has(worker.worker_id)).map((worker) => {
    const change = news.get(worker.worker_id);
    news.delete(worker.worker_id);
    return change === undefined ? worker : { ...worker, ...change };
  });
  return { workers: kept, isStale: news.size > 0 || !message.is_complete };
}

/** Samples the workers of a job, and applies changes of state as they happen. */
export function useWorkers(job: string): Sampled {
  const epoch = useLive((state) => state.epoch);
  const [turn, setTurn] = useState(0);
  const [shown, setShown] = useState<Omit<Sampled, "strips" | "reload">>({
    ...{ workers: undefined, everyS: EVERY_S, version: 0, error: undefined },
  });
  const strips = useRef<Strips>(new Map());

  useEffect(() => {
    const abort = new AbortController();
    let timer: number | undefined;
    let workers: Worker[] | undefined;
    let everyS = EVERY_S;
    let version = 0;
    strips.current = new Map();
    const publish = (error?: ApiError): void => {
      version += 1;
      setShown({ workers, everyS, version, error });
    };
    const run = async (): Promise<void> => {
      window.clearTimeout(timer);
      let error: ApiError | undefined;
      if (!document.hidden) {
        try {
          workers = await all(job, abort.signal);
          everyS = workers.length > MANY ? EVERY_MANY_S : EVERY_S;
          sample(strips.current, workers, Date.now() / 1000);
        } catch (reason) {
          error = reason instanceof ApiError ? reason : new ApiError(0, "", String(reason));
        }
      }
      if (abort.signal.aborted) return;
      publish(error);
      timer = window.setTimeout(() => void run(), everyS * 1000);
    };
    const stop = listen("workers", (message) => {
      if (message.job_id !== job || workers === undefined) return;
      const after = changed(workers, message);
      workers = after.workers;
      publish();
      if (after.isStale) void run();
    });
    void run();
    return () => {
      abort.abort();
      stop();
      window.clearTimeout(timer);
    };
  }, [job, epoch, turn]);

  const reload = useCallback(() => {
    setTurn((before) => before + 1);
  }, []);
  return { ...shown, strips: strips.current, reload };
}
