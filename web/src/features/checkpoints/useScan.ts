import { useEffect, useState } from "react";
import { ApiError } from "@/shared/api/client";
import type { ScanState } from "@/shared/api/types";

interface Scanned<T> {
  data: T | undefined;
  error: ApiError | undefined;
  isLoading: boolean;
}

/** The most requests for one answer, so that a scan that does not advance ends. */
const MAX_TURNS = 200;

/** Repeats a request that answers within its budget until its scan is complete; shows what is known meanwhile. */
export function useScan<T extends { scan: ScanState }>(
  key: string,
  load: (signal: AbortSignal) => Promise<T>,
): Scanned<T> {
  const [held, setHeld] = useState<Scanned<T> & { key: string }>({
    ...{ key: "", data: undefined, error: undefined, isLoading: true },
  });
  useEffect(() => {
    const abort = new AbortController();
    const run = async (): Promise<void> => {
      for (let turn = 0; turn < MAX_TURNS; turn += 1) {
        const data = await load(abort.signal);
        if (abort.signal.aborted) return;
        setHeld({ key, data, error: undefined, isLoading: !data.scan.is_complete });
        if (data.scan.is_complete) return;
      }
    };
    setHeld({ key, data: undefined, error: undefined, isLoading: true });
    run().catch((reason: unknown) => {
      if (abort.signal.aborted) return;
      const error = reason instanceof ApiError ? reason : new ApiError(0, "", String(reason));
      setHeld((before) => ({ ...before, error, isLoading: false }));
    });
    return () => {
      abort.abort();
    };
    // The key stands for everything that the request depends on.
    // eslint-disable-next-line react-hooks/exhaustive-deps
  }, [key]);
  return held.key === key ? held : { data: undefined, error: undefined, isLoading: true };
}
