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

interface Props {
  job: string;
  group: Group;
  shown: Shown;
  range: Range;
  smoothing: number;
  isLog: boolean;
  onZoom: (range: Range) => void;
  onToggleLog: (key: string) => void;
}

function lastOf(series: Series | undefined): { mean: number; min: number; max: number } | undefined {
  if (series === undefined || series.t.length === 0) return undefined;
  const at = series.t.length - 1;
  return { mean: series.mean[at] ?? 0, min: series.min[at] ?? 0, max: series.max[at] ?? 0 };
}

/** A chart with its newest value, scale and export. It is drawn once it has been scrolled into view. */
export function ChartPanel({ job, group, shown, range, smoothing, isLog, onZoom, onToggleLog }: Props) {
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

  const series = group.names.flatMap((name) => shown.series.get(name) ?? []);
  const first = series[0];
  const last = lastOf(first);
  const isEmpty = series.every((each) => each.t.length === 0);
  const words = series
    .map((each) => `${titleOf(each.name)} ${withUnit(lastOf(each)?.mean, each.unit)}`)
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
                downloadPng(plot.current, group.title, `${job} ${clock(range.from)} – ${clock(range.to)}`);
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
              download(new Blob([csv(series)], { type: "text/csv" }), `${fileName("strata", job, group.title)}.csv`);
            }}
          >
            csv
          </Button>
        </div>
      </header>
      <div className="chart-now">
        {series.length > 1 ? (
          <ul className="chart-legend">
            {series.map((each, index) => (
              <li key={each.name}>
                <span className="dot" style={{ background: `var(--series-${index + 1})` }} aria-hidden="true" />
                {titleOf(each.name)} <strong className="num">{withUnit(lastOf(each)?.mean, each.unit)}</strong>
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
          names={group.names}
          version={shown.version}
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
