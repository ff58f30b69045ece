import { useVirtualizer } from "@tanstack/react-virtual";
import { useMemo, useRef } from "react";
import { Link } from "wouter";
import { getRun } from "@/shared/api/getRun";
import type { Worker } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { count, duration, plural } from "@/shared/format/numbers";
import { useLive } from "@/shared/live/store";
import { useJob } from "@/shared/live/useJob";
import { Button } from "@/shared/ui/Button";
import { Select } from "@/shared/ui/Choice";
import { Command, Empty, Failure, Loading } from "@/shared/ui/Notice";
import { SearchField } from "@/shared/ui/SearchField";
import { StateDot, StatesBar, stateWords, WORKER_STATES } from "@/shared/ui/Status";
import { useQuery } from "@/shared/url/useQuery";
import { HeatStrip } from "./HeatStrip";
import { LogPanel } from "./LogPanel";
import { RunCommands } from "./RunCommands";
import { NUM_CELLS } from "./strips";
import { TimePanel } from "./TimePanel";
import { filtered, rankOf, type Sort, SORTS, sorted } from "./table";
import { type Sampled, useWorkers } from "./useWorkers";
import "./workers.css";

const ROW_PX = 42;

const COLUMNS: readonly { key: Sort; label: string; className: string }[] = [
  { key: "rank", label: "Rank", className: "right" },
  { key: "worker", label: "Worker", className: "" },
  { key: "host", label: "Host", className: "host" },
  { key: "state", label: "State", className: "" },
  { key: "silent", label: "Heartbeat", className: "right" },
  { key: "step", label: "Step", className: "right" },
];

export default function WorkersPage() {
  const { jobId } = useJob();
  if (jobId === "") {
    return (
      <div className="page">
        <h1>Workers</h1>
        <Empty icon="workers" title="No workers yet">
          <p>Workers appear here as soon as a run registers them:</p>
          <Command>strata run --workers 2 train.py</Command>
        </Empty>
      </div>
    );
  }
  return <Workers key={jobId} job={jobId} />;
}

function Workers({ job }: { job: string }) {
  const sampled = useWorkers(job);
  const { workers, error, everyS, reload } = sampled;
  const { get, set } = useQuery();
  const ended = useLive((state) => state.ended);
  const run = useApi("run", getRun).data ?? undefined;
  const logRank = /^\d+$/.test(get("log")) ? Number(get("log")) : undefined;
  const filter = { text: get("q"), state: get("state"), isSuspectOnly: get("suspect") === "true" };
  const sort = SORTS.find((key) => key === get("sort")) ?? "rank";
  const isDescending = get("desc") === "true";
  const shown = useMemo(
    () =>
      sorted(
        filtered(workers ?? [], { text: filter.text, state: filter.state, isSuspectOnly: filter.isSuspectOnly }),
        sort,
        isDescending,
      ),
    [workers, filter.text, filter.state, filter.isSuspectOnly, sort, isDescending],
  );
  const counts = useMemo(() => {
    const found: Partial<Record<Worker["state"], number>> = {};
    for (const worker of workers ?? []) found[worker.state] = (found[worker.state] ?? 0) + 1;
    return found;
  }, [workers]);
  const numSuspects = (workers ?? []).filter((worker) => worker.suspect).length;
  const isFiltered = filter.text !== "" || filter.state !== "" || filter.isSuspectOnly;

  return (
    <div className="page workers-page">
      <div className="page-head">
        <div>
          <h1>Workers</h1>
          <p className="lead">
            {workers === undefined ? "Loading…" : plural(workers.length, "worker")} of {job}
            {ended === undefined && <>, sampled every {everyS} s</>}
          </p>
        </div>
        <div className="page-tools">
          <SearchField
            label="Filter by worker or host"
            value={filter.text}
            onChange={(q) => {
              set({ q });
            }}
          />
          <Select
            label="State"
            value={filter.state}
            options={[
              { value: "", label: "Every state" },
              ...WORKER_STATES.map((state) => ({ value: state as string, label: `${stateWords(state)} (${counts[state] ?? 0})` })),
            ]}
            onChange={(state) => {
              set({ state });
            }}
          />
          <Button
            aria-pressed={filter.isSuspectOnly}
            onClick={() => {
              set({ suspect: filter.isSuspectOnly ? null : "true" });
            }}
          >
            Lost connection ({numSuspects})
          </Button>
          {run?.may_command === true && <RunCommands run={run} />}
        </div>
      </div>
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {workers !== undefined && workers.length > 0 && <StatesBar counts={counts} legend />}
      <section className="panel" aria-label="Workers">
        {workers === undefined && error === undefined && <Loading rows={8} label="Loading the workers" />}
        {workers?.length === 0 && ended !== undefined && (
          <Empty icon="workers" title="This run is over">
            <p>Its workers have left. {ended.log_ranks.length > 0 ? "Their logs:" : "It has no logs on this machine."}</p>
            <div className="log-ranks">
              {ended.log_ranks.map((rank) => (
                <Button
                  key={rank}
                  onClick={() => {
                    set({ log: rank.toString(), attempt: null });
                  }}
                >
                  Log of rank {rank}
                </Button>
              ))}
            </div>
          </Empty>
        )}
        {workers?.length === 0 && ended === undefined && (
          <Empty icon="workers" title="This job has no workers now">
            They left or have not registered yet. The <Link href={`/events?job=${encodeURIComponent(job)}`}>events</Link>{" "}
            tell why.
          </Empty>
        )}
        {workers !== undefined && workers.length > 0 && (
          <Table
            {...{ shown, sampled, sort, isDescending }}
            onLog={
              run === undefined
                ? undefined
                : (rank) => {
                    set({ log: rank.toString(), attempt: null });
                  }
            }
            onSort={(key) => {
              set({ sort: key === "rank" ? null : key, desc: key === sort && !isDescending ? "true" : null });
            }}
          />
        )}
        {shown.length === 0 && isFiltered && (
          <Empty icon="search" title="No worker matches the filters">
            <Button
              onClick={() => {
                set({ q: null, state: null, suspect: null });
              }}
            >
              Clear the filters
            </Button>
          </Empty>
        )}
      </section>
      {run !== undefined && logRank !== undefined && (
        <LogPanel
          key={logRank}
          rank={logRank}
          mayCommand={run.may_command}
          onClose={() => {
            set({ log: null, attempt: null });
          }}
        />
      )}
      {workers !== undefined && workers.length > 0 && <TimePanel job={job} />}
    </div>
  );
}

interface TableProps {
  shown: Worker[];
  sampled: Sampled;
  sort: Sort;
  isDescending: boolean;
  onSort: (sort: Sort) => void;
  /** Shows the log of a rank; undefined if this server has no logs. */
  onLog: ((rank: number) => void) | undefined;
}

/** Only the rows in view are in the document, however many workers there are. */
function Table({ shown, sampled, sort, isDescending, onSort, onLog }: TableProps) {
  const { strips, version, everyS } = sampled;
  const scroll = useRef<HTMLDivElement>(null);
  const rows = useVirtualizer({
    count: shown.length,
    getScrollElement: () => scroll.current,
    estimateSize: () => ROW_PX,
    overscan: 8,
  });
  const mostSteps = shown.reduce((most, worker) => Math.max(most, worker.step), 0);
  return (
    <div
      className="workers-scroll"
      ref={scroll}
      role="table"
      aria-label="Workers"
      aria-rowcount={shown.length + 1}
      // A region that scrolls must be reachable from the keyboard.
      // eslint-disable-next-line jsx-a11y/no-noninteractive-tabindex
      tabIndex={0}
    >
      <div className="workers-row workers-head" role="row" aria-rowindex={1}>
        {COLUMNS.map((column) => (
          <div
            key={column.key}
            role="columnheader"
            className={column.className}
            aria-sort={column.key === sort ? (isDescending ? "descending" : "ascending") : "none"}
          >
            <button
              type="button"
              onClick={() => {
                onSort(column.key);
              }}
            >
              {column.label}
              <span aria-hidden="true">{column.key === sort ? (isDescending ? " ↓" : " ↑") : ""}</span>
            </button>
          </div>
        ))}
        <div role="columnheader" className="strip-head">
          <span>State · step rate · heartbeat</span>
          <span className="muted">last {duration(NUM_CELLS * everyS)}</span>
        </div>
        <div role="columnheader" className="right attempt">
          Attempt
        </div>
      </div>
      <div className="workers-body" role="rowgroup" style={{ height: rows.getTotalSize() }}>
        {rows.getVirtualItems().map((item) => {
          const worker = shown[item.index];
          if (worker === undefined) return null;
          const isLate = worker.silent_s > 3 || worker.suspect;
          return (
            <div
              key={worker.worker_id}
              className="workers-row"
              role="row"
              aria-rowindex={item.index + 2}
              style={{ transform: `translateY(${item.start}px)` }}
            >
              <div role="cell" className="right num">
                {rankOf(worker)}
              </div>
              <div role="cell" className="truncate" title={worker.worker_id}>
                <Link
                  href={`/events?job=${encodeURIComponent(worker.job_id)}&worker=${encodeURIComponent(worker.worker_id)}`}
                  title="Events of this worker"
                >
                  {worker.worker_id}
                </Link>
                {onLog !== undefined && worker.launch_rank !== null && worker.launch_rank !== undefined && (
                  <Button
                    look="quiet"
                    className="log-button"
                    aria-label={`Log of ${worker.worker_id}`}
                    onClick={() => {
                      if (typeof worker.launch_rank === "number") onLog(worker.launch_rank);
                    }}
                  >
                    log
                  </Button>
                )}
              </div>
              <div role="cell" className="truncate muted host" title={worker.hostname}>
                {worker.hostname}
              </div>
              <div role="cell" className="state">
                <StateDot state={worker.state} />
                <span className="truncate">{stateWords(worker.state)}</span>
                {worker.suspect && <span className="badge warning">lost</span>}
              </div>
              <div role="cell" className={isLate ? "right num late" : "right num"}>
                {duration(worker.silent_s)}
              </div>
              <div role="cell" className="right num step">
                {count(worker.step)}
                <span className="muted behind">
                  {mostSteps - worker.step > 0 ? `−${count(mostSteps - worker.step)}` : ""}
                </span>
              </div>
              <div role="cell">
                <HeatStrip strip={strips.get(worker.worker_id)} version={version} />
              </div>
              <div role="cell" className="right num muted attempt" title={`incarnation ${worker.incarnation}`}>
                {worker.attempt ?? "–"}
              </div>
            </div>
          );
        })}
      </div>
    </div>
  );
}
