/** Series of a chart: buckets with minimum, mean and maximum, extended by live points and smoothed for display. */
import type { SeriesPoints } from "@/shared/api/types";

export interface Series {
  name: string;
  unit: string;
  intervalS: number;
  t: number[];
  min: number[];
  mean: number[];
  max: number[];
  /** Live points merged into the last bucket. */
  numInLast: number;
}

export type Spread = readonly [min: number, mean: number, max: number];

/** A time without points longer than this many intervals is a gap, and no line is drawn across it. */
const GAP_INTERVALS = 3;

/** Returns a series of the history, moved by seconds on the time axis. */
export function fromHistory(points: SeriesPoints, shiftS = 0): Series {
  return {
    name: points.name,
    unit: points.unit,
    intervalS: Math.max(points.interval_s, 1),
    t: points.t.map((t) => t + shiftS),
    min: points.min.slice(),
    mean: points.mean.slice(),
    max: points.max.slice(),
    numInLast: 1,
  };
}

export function emptySeries(name: string, unit: string): Series {
  return { name, unit, intervalS: 1, t: [], min: [], mean: [], max: [], numInLast: 0 };
}

/** Adds a live point in place: into the last bucket if it falls there, else as a new one; drops what left the window. */
export function append(series: Series, atS: number, [min, mean, max]: Spread, windowS: number): void {
  const last = series.t.length - 1;
  const lastT = series.t[last];
  if (lastT !== undefined && atS <= lastT) return; // the history had it already
  if (lastT !== undefined && series.intervalS > 1 && atS < lastT + series.intervalS) {
    series.numInLast += 1;
    series.min[last] = Math.min(series.min[last] ?? min, min);
    series.max[last] = Math.max(series.max[last] ?? max, max);
    const before = series.mean[last] ?? mean;
    series.mean[last] = before + (mean - before) / series.numInLast;
    return;
  }
  series.t.push(atS);
  series.min.push(min);
  series.mean.push(mean);
  series.max.push(max);
  series.numInLast = 1;
  const numOld = series.t.findIndex((t) => t >= atS - windowS);
  if (numOld > 0) for (const column of [series.t, series.min, series.mean, series.max]) column.splice(0, numOld);
}

/** Returns an exponential moving average, corrected for its start as Adam's is; 0 returns the values themselves. */
export function smoothed(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return values.slice();
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

export interface Columns {
  t: number[];
  /** One column per series, aligned with `t`; null where the series has no value. */
  min: (number | null)[][];
  mean: (number | null)[][];
  max: (number | null)[][];
}

/** Aligns series on one time axis and opens gaps, which charts draw as such. */
export function aligned(all: readonly Series[]): Columns {
  const times = new Set<number>();
  for (const series of all) {
    const widest = series.intervalS * GAP_INTERVALS;
    series.t.forEach((t, index) => {
      const before = series.t[index - 1];
      if (before !== undefined && t - before > widest) times.add(before + series.intervalS);
      times.add(t);
    });
  }
  const t = [...times].sort((a, b) => a - b);
  const columns: Columns = { t, min: [], mean: [], max: [] };
  for (const series of all) {
    const at = new Map(series.t.map((time, index) => [time, index]));
    const pick = (values: number[]): (number | null)[] =>
      t.map((time) => {
        const index = at.get(time);
        return index === undefined ? null : (values[index] ?? null);
      });
    columns.min.push(pick(series.min));
    columns.mean.push(pick(series.mean));
    columns.max.push(pick(series.max));
  }
  return columns;
}

/** Returns values for a logarithmic axis, which has no place for zero and below. */
export function positive(values: readonly (number | null)[]): (number | null)[] {
  return values.map((value) => (value !== null && value > 0 ? value : null));
}

/** Returns series as CSV, one row per moment and series. */
export function csv(all: readonly Series[]): string {
  const rows = all.flatMap((series) =>
    series.t.map((t, index) =>
      [
        new Date(t * 1000).toISOString(),
        quoted(series.name),
        quoted(series.unit),
        series.min[index],
        series.mean[index],
        series.max[index],
      ].join(","),
    ),
  );
  return ["time,series,unit,min,mean,max", ...rows, ""].join("\n");
}

/** Quotes a field; one that a spreadsheet would run as a formula is made text. */
function quoted(field: string): string {
  const harmless = /^[=+\-@\t\r]/.test(field) ? `'${field}` : field;
  return /[",\n\r]/.test(harmless) ? `"${harmless.replaceAll('"', '""')}"` : harmless;
}

/** Returns the title of a series: the metric's own name, or ours in words. */
export function titleOf(name: string): string {
  const titles: Record<string, string> = {
    steps_per_s: "Steps per second",
    rows_per_s: "Rows per second",
    step: "Step",
    epoch: "Epoch",
    checkpoint_age_s: "Checkpoint age",
    requests_per_s: "Coordinator requests",
    barrier_p50_s: "Barrier p50",
    barrier_p99_s: "Barrier p99",
  };
  return titles[name] ?? name.replace(/^metric:/, "");
}
