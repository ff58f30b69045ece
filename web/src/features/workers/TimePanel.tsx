import { useCallback } from "react";
import { getTime, TIMED_WORKERS } from "@/shared/api/getTime";
import type { JobTime, WorkerTime } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { Canvas } from "@/shared/chart/Canvas";
import { count } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";
import { Button } from "@/shared/ui/Button";
import { Failure } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { useQuery } from "@/shared/url/useQuery";
import { words } from "./time";

const REFRESH_S = 5;
const HEIGHT = 18;
/** Reports that the server keeps: three minutes. */
const NUM_CELLS = 36;
const PARTS = [
  { name: "computing", label: "busy: computing", colour: "--state-training" },
  { name: "waiting", label: "waiting: data, saves", colour: "--state-loading" },
  { name: "blocked", label: "blocked by other ranks", colour: "--state-recovering" },
] as const;

/** What each rank did in the last three minutes, and which one the others wait for. */
export function TimePanel({ job }: { job: string }) {
  const { get, set } = useQuery();
  const offset = /^\d{1,9}$/.test(get("from_rank")) ? Number(get("from_rank")) : 0;
  const { data, error, reload } = useApi(`time ${job} ${offset}`, (signal) => getTime(job, offset, signal), {
    everyS: REFRESH_S,
    keep: true,
  });
  if (error !== undefined) return <Failure error={error} onRetry={reload} />;
  if (data === undefined) return null;
  const { items, total, next_offset: next } = data.workers;
  return (
    <Panel title="Time of each rank" detail="busy, waiting and blocked, last three minutes">
      <Verdict data={data} />
      <ul className="time-legend">
        {PARTS.map((part) => (
          <li key={part.name}>
            <span className="dot" style={{ background: `var(${part.colour})` }} aria-hidden="true" /> {part.label}
          </li>
        ))}
      </ul>
      <div className="time-rows">
        {items.map((worker) => (
          <div className="time-row" key={worker.worker_id}>
            <span className="truncate" title={worker.worker_id}>
              <span className="num">rank {worker.rank}</span> <span className="mono muted">{worker.worker_id}</span>
            </span>
            <TimeStrip worker={worker} />
            <span className="num time-words">{words(worker)}</span>
          </div>
        ))}
      </div>
      {total > items.length && (
        <div className="time-pages">
          <Button
            disabled={offset === 0}
            onClick={() => {
              set({ from_rank: offset > TIMED_WORKERS ? (offset - TIMED_WORKERS).toString() : null });
            }}
          >
            Previous ranks
          </Button>
          <span className="muted num">
            {count(offset + 1)}–{count(offset + items.length)} of {count(total)}
          </span>
          <Button
            disabled={next === null}
            onClick={() => {
              set({ from_rank: (next ?? 0).toString() });
            }}
          >
            More ranks
          </Button>
        </div>
      )}
    </Panel>
  );
}

function Verdict({ data }: { data: JobTime }) {
  const isHidden = data.workers.items.some((each) => each.ended_at_s.length > 0 && !each.is_collective_known);
  // The reason for no verdict may say the same.
  const isToldTwice = data.no_verdict.includes("collectives");
  return (
    <p className={data.straggler === null ? "muted" : "strong"}>
      {data.straggler === null ? `No verdict on a straggler: ${data.no_verdict}.` : `${data.straggler.line}.`}
      {isHidden && !isToldTwice && " Waits in collectives of torch are not measured; they are part of busy."}
    </p>
  );
}

/** One column per report, newest at the right; the parts of a column add up to its height. */
function TimeStrip({ worker }: { worker: WorkerTime }) {
  const key = `${worker.ended_at_s.at(-1) ?? 0} ${worker.ended_at_s.length}`;
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width }: { width: number }) => {
      const cell = width / NUM_CELLS;
      const first = NUM_CELLS - worker.ended_at_s.length;
      context.fillStyle = token("--sunken");
      context.fillRect(0, 0, width, HEIGHT);
      worker.ended_at_s.forEach((_, index) => {
        let top = HEIGHT;
        for (const { name, colour } of PARTS) {
          const part = (worker[name][index] ?? 0) * HEIGHT;
          context.fillStyle = token(colour);
          context.fillRect((first + index) * cell, top - part, Math.max(cell - 1, 1), part);
          top -= part;
        }
      });
    },
    // The lists come anew with every answer; draw again only if there is a newer report.
    // eslint-disable-next-line react-hooks/exhaustive-deps
    [key, worker.worker_id],
  );
  return <Canvas label={`Time of rank ${worker.rank}: ${words(worker)}`} height={HEIGHT} draw={draw} />;
}
