import { useCallback, useEffect, useState } from "react";
import { ApiError, whenUnauthenticated } from "@/shared/api/client";
import { getOverview } from "@/shared/api/getOverview";
import { getSession } from "@/shared/api/getSession";
import type { Overview } from "@/shared/api/types";
import { receive, useLive, withOverview } from "@/shared/live/store";
import { openStream } from "@/shared/live/stream";

export type Phase = "loading" | "login" | "ready" | "offline-only" | "failed";

export interface ConnectionState {
  phase: Phase;
  error: ApiError | undefined;
  retry: () => void;
}

const RETRY_S = 3;

/** Loads the session and the overview, then follows the live stream; shows the login when a request asks for it. */
export function useConnection(): ConnectionState {
  const [phase, setPhase] = useState<Phase>("loading");
  const [error, setError] = useState<ApiError>();
  const [turn, setTurn] = useState(0);

  const retry = useCallback(() => {
    setTurn((before) => before + 1);
  }, []);

  useEffect(() => {
    let isOver = false;
    let close: () => void = () => undefined;
    let timer: number | undefined;
    whenUnauthenticated(() => {
      if (!isOver) setPhase("login");
    });

    const load = async (): Promise<Overview> => {
      const overview = await getOverview();
      if (!isOver) useLive.setState((state) => withOverview(state, overview), true);
      return overview;
    };

    const begin = async (): Promise<void> => {
      const session = await getSession();
      if (isOver) return;
      if (session !== null) useLive.setState({ version: session.version });
      if (session?.login_required === true) {
        setPhase("login");
        return;
      }
      let overview: Overview;
      try {
        overview = await load();
      } catch (reason) {
        if (reason instanceof ApiError && reason.status === 404) {
          setPhase("offline-only"); // `strata dashboard DIR`: checkpoints without a coordinator
          return;
        }
        throw reason;
      }
      if (isOver) return;
      setError(undefined);
      setPhase("ready");
      if (overview.ended !== null) return; // nothing changes any more
      close = openStream({
        cursor: overview.cursor,
        on: (name, data) => {
          if (name === "reset") load().catch(() => undefined);
          receive(name, data);
        },
        onConnection: (connection, retryInS) => {
          useLive.setState({ connection, retryAtMs: Date.now() + retryInS * 1000 });
        },
        onRetry: () => {
          // An EventSource hides the status of its answer; a request shows the login if that is the reason.
          getSession().then(
            (found) => {
              if (found?.login_required === true && !isOver) setPhase("login");
            },
            () => undefined,
          );
        },
      });
    };

    begin().catch((reason: unknown) => {
      if (isOver || (reason instanceof ApiError && reason.status === 401)) return;
      setError(reason instanceof ApiError ? reason : new ApiError(0, "", String(reason)));
      setPhase("failed");
      timer = window.setTimeout(retry, RETRY_S * 1000);
    });
    return () => {
      isOver = true;
      close();
      window.clearTimeout(timer);
    };
  }, [turn, retry]);

  return { phase, error, retry };
}
