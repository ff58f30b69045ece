import { useEffect, useRef, useState } from "react";
import { ApiError } from "@/shared/api/client";
import { getLog } from "@/shared/api/getLog";
import { postStacks } from "@/shared/api/postStacks";
import { useApi } from "@/shared/api/useApi";
import { plural } from "@/shared/format/numbers";
import { Button } from "@/shared/ui/Button";
import { Select } from "@/shared/ui/Choice";
import { Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { useQuery } from "@/shared/url/useQuery";

const EVERY_S = 2;
/** Pixels from the end within which the view follows new lines. */
const NEAR_PX = 40;

interface Props {
  rank: number;
  /** Whether this reader may order something of the run. */
  mayCommand: boolean;
  onClose: () => void;
}

/** The end of a worker's log, kept up to date; it follows new lines unless the reader has scrolled up. */
export function LogPanel({ rank, mayCommand, onClose }: Props) {
  const { get, set } = useQuery();
  const attempt = /^\d+$/.test(get("attempt")) ? Number(get("attempt")) : undefined;
  const log = useApi(`log ${rank} ${attempt ?? ""}`, (signal) => getLog(rank, attempt, signal), { everyS: EVERY_S });
  const scroll = useRef<HTMLPreElement>(null);
  const isAtEnd = useRef(true);
  const lines = log.data?.lines;
  const [refusal, setRefusal] = useState<ApiError>();
  const askForStacks = (): void => {
    setRefusal(undefined);
    isAtEnd.current = true;
    set({ attempt: null }); // only the newest attempt runs
    postStacks(rank).then(log.reload, (reason: unknown) => {
      setRefusal(reason instanceof ApiError ? reason : new ApiError(0, "", String(reason)));
    });
  };
  useEffect(() => {
    const view = scroll.current;
    if (view !== null && isAtEnd.current) view.scrollTop = view.scrollHeight;
  }, [lines]);
  return (
    <Panel
      title={`Log of rank ${rank}`}
      detail={log.data === undefined ? undefined : `attempt ${log.data.attempt}, last ${plural(log.data.lines.length, "line")}`}
      actions={
        <>
          {log.data !== undefined && log.data.attempts.length > 1 && (
            <Select
              label="Attempt"
              value={log.data.attempt.toString()}
              options={log.data.attempts.map((each) => ({ value: each.toString(), label: `attempt ${each}` }))}
              onChange={(chosen) => {
                set({ attempt: chosen });
              }}
            />
          )}
          {mayCommand && (
            <Button title="Write the stacks of all threads to this log; the worker continues" onClick={askForStacks}>
              Dump stacks
            </Button>
          )}
          <Button look="quiet" icon="close" aria-label="Close the log" onClick={onClose} />
        </>
      }
    >
      {refusal !== undefined && <Failure error={refusal} />}
      {log.error !== undefined && <Failure error={log.error} onRetry={log.reload} />}
      {log.data === undefined && log.error === undefined && <Loading rows={4} label="Loading the log" />}
      {lines?.length === 0 && <p className="muted">The worker has printed nothing yet.</p>}
      {lines !== undefined && lines.length > 0 && (
        <pre
          ref={scroll}
          className="log"
          aria-label={`Log of rank ${rank}`}
          // A region that scrolls must be reachable from the keyboard.
          // eslint-disable-next-line jsx-a11y/no-noninteractive-tabindex
          tabIndex={0}
          onScroll={({ currentTarget }) => {
            isAtEnd.current =
              currentTarget.scrollHeight - currentTarget.scrollTop - currentTarget.clientHeight < NEAR_PX;
          }}
        >
          {lines.join("\n")}
        </pre>
      )}
    </Panel>
  );
}
