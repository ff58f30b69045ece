import { useMemo } from "react";
import { getSeries } from "@/shared/api/getSeries";
import { useApi } from "@/shared/api/useApi";
import type { Range } from "@/shared/chart/TimeChart";
import { csv, titleOf } from "@/shared/chart/series";
import { useSeries } from "@/shared/chart/useSeries";
import { clock } from "@/shared/format/times";
import { useLive } from "@/shared/live/store";
import { Button } from "@/shared/ui/Button";
import { Choice, Select } from "@/shared/ui/Choice";
import { type Command, useCommands } from "@/shared/ui/commands";
import { download, fileName } from "@/shared/ui/download";
import { MomentLink } from "@/shared/ui/MomentLink";
import { Empty, Failure, Loading } from "@/shared/ui/Notice";
import { useQuery } from "@/shared/url/useQuery";
import { ChartPanel } from "./ChartPanel";
import { COORDINATOR, groups } from "./groups";
import { comparedIn, MAX_COMPARED, useCompared } from "./useCompared";

const WINDOWS = { "5m": 300, "1h": 3_600, "12h": 43_200, "7d": 604_800 } as const;
type Window = keyof typeof WINDOWS;
const SMOOTHING = ["0", "0.6", "0.9", "0.97"] as const;
/** New series appear when a script first reports them. */
const NAMES_EVERY_S = 15;
/** The shortest time axis, so that the first seconds of a run do not fill the chart. */
const LEAST_S = 60;
const NONE: readonly never[] = [];
const COORDINATOR_NAMES = COORDINATOR.flatMap((group) => group.names);

function parse(text: string): number | undefined {
  const value = Number.parseFloat(text);
  return Number.isFinite(value) ? value : undefined;
}

/** Charts of every series of a job and of the coordinator, with one time axis. */
export function Charts({ job }: { job: string }) {
  const { get, set } = useQuery();
  const atS = useLive((state) => state.atS);
  const window_ = (get("window") in WINDOWS ? get("window") : "5m") as Window;
  const smoothing = SMOOTHING.find((value) => value === get("smooth")) ?? "0";
  const from = parse(get("from"));
  const to = parse(get("to"));
  const isZoomed = from !== undefined && to !== undefined && from < to;
  const windowS = WINDOWS[window_];
  const ended = useLive((state) => state.ended);
  const isOver = ended !== undefined;
  const whole = ended === undefined ? undefined : { from: ended.began_at_s, to: ended.ended_at_s };
  const zoom = isZoomed ? { from, to } : (whole ?? {});

  const names = useApi(`series ${job}`, (signal) => getSeries(job, signal), { everyS: NAMES_EVERY_S });
  const jobGroups = useMemo(() => groups((names.data?.items ?? []).map((each) => each.name), titleOf), [names.data]);
  const jobNames = useMemo(() => jobGroups.flatMap((group) => group.names), [jobGroups]);
  const ofJob = useSeries({ job, names: jobNames, windowS, ...zoom });
  const chosen = useMemo(() => comparedIn(get("with"), job), [get, job]);
  const compared = useCompared(names.data?.items ?? [], chosen, { names: jobNames, windowS, ...zoom });
  const offered = useLive((state) => state.jobs).filter(({ job_id }) => job_id !== job && !chosen.includes(job_id));
  const ofCoordinator = useSeries({ job: "", names: COORDINATOR_NAMES, windowS, ...zoom });

  const first = Math.min(...[...ofJob.series.values(), ...ofCoordinator.series.values()].map((each) => each.t[0] ?? atS));
  const range: Range = isZoomed
    ? { from, to }
    : whole !== undefined
    ? { from: Math.min(Math.max(whole.from, first), whole.to - LEAST_S), to: whole.to }
    : { from: Math.min(Math.max(atS - windowS, first), atS - LEAST_S), to: atS };

  const logs = useMemo(() => new Set(get("log").split(",").filter((key) => key !== "")), [get]);
  const toggleLog = (key: string): void => {
    const changed = new Set(logs);
    if (!changed.delete(key)) changed.add(key);
    set({ log: [...changed].join(",") });
  };
  const onZoom = (next: Range): void => {
    set({ from: next.from.toFixed(1), to: next.to.toFixed(1) }, { push: true });
  };
  const exportAll = (): void => {
    const text = csv([...ofJob.series.values(), ...ofCoordinator.series.values()]);
    download(new Blob([text], { type: "text/csv" }), `${fileName("strata", job)}.csv`);
  };
  const commands: Command[] = useMemo(
    () =>
      (isOver ? [] : (Object.keys(WINDOWS) as Window[])).map((key) => ({
        id: `window-${key}`,
        group: "Charts",
        label: `Show the last ${key}`,
        run: () => {
          set({ window: key, from: null, to: null });
        },
      })),
    [set, isOver],
  );
  useCommands("charts", commands);

  const error = ofJob.error ?? names.error;
  return (
    <section aria-labelledby="charts-title" className="charts">
      <div className="page-head">
        <h2 id="charts-title">Charts</h2>
        <div className="page-tools">
          {offered.length > 0 && chosen.length < MAX_COMPARED && (
            <Select
              label="Compare with another job"
              value=""
              options={[
                { value: "", label: "Compare with…" },
                ...offered.map(({ job_id }) => ({ value: job_id, label: job_id })),
              ]}
              onChange={(other) => {
                set({ with: [...chosen, other].join(",") });
              }}
            />
          )}
          {isZoomed ? (
            <>
              <span className="muted num">
                {clock(from)} – {clock(to)}
              </span>
              <MomentLink atS={to}>Events</MomentLink>
              <Button
                icon="zoomOut"
                onClick={() => {
                  set({ from: null, to: null });
                }}
              >
                {whole === undefined ? "Back to live" : "Whole run"}
              </Button>
            </>
          ) : whole !== undefined ? (
            <span className="muted num">
              {clock(range.from)} – {clock(range.to)}
            </span>
          ) : (
            <Choice
              label="Time span"
              value={window_}
              options={(Object.keys(WINDOWS) as Window[]).map((value) => ({ value, label: value }))}
              onChange={(value) => {
                set({ window: value === "5m" ? null : value });
              }}
            />
          )}
          <Select
            label="Smoothing"
            value={smoothing}
            options={SMOOTHING.map((value) => ({ value, label: value === "0" ? "No smoothing" : `Smoothing ${value}` }))}
            onChange={(value) => {
              set({ smooth: value === "0" ? null : value });
            }}
          />
          <Button icon="download" onClick={exportAll}>
            CSV
          </Button>
        </div>
      </div>
      {chosen.length > 0 && (
        <p className="compared muted">
          Compared from their first values on with
          {chosen.map((other) => (
            <Button
              key={other}
              icon="close"
              aria-label={`${other}: stop comparing`}
              onClick={() => {
                set({ with: chosen.filter((each) => each !== other).join(",") });
              }}
            >
              {other}
            </Button>
          ))}
        </p>
      )}
      {error !== undefined && <Failure error={error} onRetry={names.reload} />}
      {names.isLoading && names.data === undefined && <Loading rows={4} label="Loading the charts" />}
      {names.data !== undefined && jobGroups.length === 0 && (
        <div className="panel">
          <Empty icon="overview" title="No figures yet">
            <p>Steps per second appear with the first steps. To chart a metric, report it from the training loop:</p>
            <code className="command">ctx.report(step=step, loss=loss.item())</code>
          </Empty>
        </div>
      )}
      <div className="chart-grid">
        {jobGroups.map((group) => (
          <ChartPanel
            key={`${job} ${group.key}`}
            {...{ job, group, range, onZoom, shown: ofJob, compared, smoothing: Number(smoothing), isLog: logs.has(group.key) }}
            onToggleLog={toggleLog}
          />
        ))}
        {COORDINATOR.map((group) => (
          <ChartPanel
            key={group.key}
            {...{ job: "", group, range, onZoom, shown: ofCoordinator, compared: NONE, smoothing: Number(smoothing) }}
            isLog={logs.has(group.key)}
            onToggleLog={toggleLog}
          />
        ))}
      </div>
    </section>
  );
}
