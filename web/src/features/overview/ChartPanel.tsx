import { useEffect, useRef, useState } from "react";
import type uPlot from "uplot";
import { downloadPng } from "@/shared/chart/png";
import { csv, type Series, titleOf } from "@/shared/chart/series";
import { type Range, TimeChart } from "@/shared/chart/TimeChart";
import type { Shown } from "@/shared/chart/useSeries";
import { compact, withUnit } from "@/shared/format/numbers";
import { clock } from "@/shared/format/times";
import { Button } from "@/shared/ui/Button";
import { download, fileName } from "@/shared/ui/download";
import type { Group } from "./groups";
import type { Compared } from "./useCompared";

interface Props {
  job: string;
  group: Group;
  shown: Shown;
  compared: readonly Compared[];
  range: Range;
  smoothing: number;
  isLog: boolean;
  onZoom: (range: Range) => void;
  onToggleLog: (key: string) => void;
}

interface Line {
  label: string;
  series: Series;
  /** Seconds by which it was moved, so that runs begin together. */
  shiftS: number;
}

/** Returns a line as it was measured, under a name that is unique in its file. */
function exported({ label, series, shiftS }: Line, index: number): Series {
  if (index === 0) return series;
  const name = shiftS === 0 && label === titleOf(series.name) ? series.name : `${label} ${series.name}`;
  return { ...series, name, t: series.t.map((t) => t - shiftS) };
}

function lastOf(series: Series | undefined): { mean: number; min: number; max: number } | undefined {
  if (series === undefined || series.t.length === 0) return undefined;
  const at = series.t.length - 1;
  return { mean: series.mean[at] ?? 0, min: series.min[at] ?? 0, max: series.max[at] ?? 0 };
}

/** A chart with its newest value, scale and export. It is drawn once it has been scrolled into view. */
export function ChartPanel({ job, group, shown, compared, range, smoothing, isLog, onZoom, onToggleLog }: Props) {
  const host = useRef<HTMLElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    const element = host.current;
    if (element === null) return undefined;
    const observer = new IntersectionObserver(
      (entries) => {
        setSeen(entries.some((entry) => entry.isIntersecting));
      },
      { rootMargin: "200px" },
    );
    observer.observe(element);
    return () => {
      observer.disconnect();
    };
  }, []);

  const own: Line[] = group.names.flatMap((name) => {
    const found = shown.series.get(name);
    return found === undefined ? [] : [{ label: compared.length > 0 ? job : titleOf(name), series: found, shiftS: 0 }];
  });
  const others: Line[] = compared.flatMap((other) =>
    group.names.flatMap((name) => {
      const found = other.shown.series.get(name);
      return found === undefined ? [] : [{ label: other.job, series: found, shiftS: other.shiftS }];
    }),
  );
  const lines = [...own, ...others];
  const series = lines.map((each) => each.series);
  const first = series[0];
  const last = lastOf(first);
  const isEmpty = series.every((each) => each.t.length === 0);
  const words = lines
    .map((each) => `${each.label} ${withUnit(lastOf(each.series)?.mean, each.series.unit)}`)
    .join(", ");
  return (
    <article className="chart-panel" ref={host} aria-label={group.title}>
      <header>
        <div className="chart-title">
          <h3 className="truncate" title={group.title}>
            {group.title}
          </h3>
          {first !== undefined && first.unit !== "" && <span className="muted chart-unit">{first.unit}</span>}
        </div>
        <div className="chart-tools">
          <Button
            look="quiet"
            className="text"
            aria-pressed={isLog}
            aria-label={`log: logarithmic scale of ${group.title}`}
            title="Logarithmic scale"
            onClick={() => {
              onToggleLog(group.key);
            }}
          >
            log
          </Button>
          <Button
            look="quiet"
            className="text"
            aria-label={`png: download ${group.title}`}
            title="Download as PNG"
            disabled={isEmpty}
            onClick={() => {
              if (plot.current !== null) {
                downloadPng(plot.current, group.title, `${[job, ...compared.map((each) => each.job)].join(", ")} ${clock(range.from)} – ${clock(range.to)}`);
              }
            }}
          >
            png
          </Button>
          <Button
            look="quiet"
            className="text"
            aria-label={`csv: download ${group.title}`}
            title="Download as CSV"
            disabled={isEmpty}
            onClick={() => {
              download(new Blob([csv(lines.map(exported))], { type: "text/csv" }), `${fileName("strata", job, group.title)}.csv`);
            }}
          >
            csv
          </Button>
        </div>
      </header>
      <div className="chart-now">
        {lines.length > 1 ? (
          <ul className="chart-legend">
            {lines.map((each, index) => (
              <li key={each.label}>
                <span className="dot" style={{ background: `var(--series-${index + 1})` }} aria-hidden="true" />
                {each.label}{" "}
                <strong className="num">{withUnit(lastOf(each.series)?.mean, each.series.unit)}</strong>
              </li>
            ))}
          </ul>
        ) : (
          <>
            <strong className="num">{withUnit(last?.mean, first?.unit === "s" ? "s" : "")}</strong>
            {last !== undefined && last.min !== last.max && (
              <span className="muted num truncate" title="Lowest and highest rank">
                {compact(last.min)} … {compact(last.max)} over ranks
              </span>
            )}
          </>
        )}
      </div>
      {isEmpty ? (
        <p className="chart-none muted">{shown.isLoading ? "Loading…" : "No values in this time span."}</p>
      ) : isSeen ? (
        <TimeChart
          label={`${group.title} over time. Now: ${words}.`}
          series={series}
          names={lines.map((each) => each.label)}
          version={compared.reduce((sum, each) => sum + each.shown.version, shown.version)}
          syncKey="overview"
          {...{ range, isLog, smoothing, onZoom }}
          onReady={(ready) => {
            plot.current = ready;
          }}
        />
      ) : (
        <div className="chart-place" />
      )}
    </article>
  );
}
