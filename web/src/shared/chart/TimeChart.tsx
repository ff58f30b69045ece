import { useEffect, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { compact, withUnit } from "@/shared/format/numbers";
import { clock, day } from "@/shared/format/times";
import { token, useTheme } from "@/shared/theme/theme";
import { useSize } from "@/shared/ui/useSize";
import { aligned, positive, type Series, smoothed } from "./series";

export interface Range {
  from: number;
  to: number;
}

interface Props {
  label: string;
  series: readonly Series[];
  /** One for each series; shown where there are several. */
  names: readonly string[];
  /** Rises with each change of the series, which are changed in place. */
  version: number;
  range: Range;
  isLog: boolean;
  smoothing: number;
  height?: number;
  /** Charts with the same key show their cursor at the same moment. */
  syncKey?: string;
  onZoom: (range: Range) => void;
  onReady?: (plot: uPlot | null) => void;
}

const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5"] as const;

function faded(colour: string, percent: number): string {
  return `color-mix(in srgb, ${colour} ${percent}%, transparent)`;
}

/** Round distances between the labels of the time axis. */
const TICKS_S = [1, 5, 10, 15, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 14_400, 43_200, 86_400, 172_800];

type Data = [number[], ...(number | null)[][]];

/** Each series takes three columns: its mean, and the bounds of its band. */
function dataOf({ series, isLog, smoothing }: Pick<Props, "series" | "isLog" | "smoothing">): Data {
  const { t, min, mean, max } = aligned(series);
  const shown = (values: (number | null)[]): (number | null)[] => (isLog ? positive(values) : values);
  return [
    t,
    ...series.flatMap((_, index) => [
      shown(smoothed(mean[index] ?? [], smoothing)),
      shown(max[index] ?? []),
      shown(min[index] ?? []),
    ]),
  ];
}

function tooltip(host: HTMLElement, shown: () => Pick<Props, "series" | "names">): uPlot.Plugin {
  const box = document.createElement("div");
  box.className = "chart-tip";
  box.hidden = true;
  return {
    hooks: {
      init: (plot) => {
        plot.over.append(box);
      },
      setCursor: (plot) => {
        const { idx, left } = plot.cursor;
        const at = idx === null || idx === undefined ? undefined : plot.data[0][idx];
        if (at === undefined || idx === null || idx === undefined || left === undefined || left < 0) {
          box.hidden = true;
          return;
        }
        box.replaceChildren();
        const title = document.createElement("div");
        title.className = "chart-tip-time";
        title.textContent = clock(at);
        box.append(title);
        const { series: all, names } = shown();
        all.forEach((series, index) => {
          const mean = plot.data[1 + index * 3]?.[idx];
          const most = plot.data[2 + index * 3]?.[idx];
          const least = plot.data[3 + index * 3]?.[idx];
          if (mean === null || mean === undefined) return;
          const row = document.createElement("div");
          if (names.length > 1) row.append(`${names[index] ?? ""} `);
          const value = document.createElement("strong");
          value.textContent = withUnit(mean, series.unit);
          row.append(value);
          if (most !== null && most !== undefined && least !== null && least !== undefined && most !== least) {
            row.append(` ${compact(least)} … ${compact(most)}`);
          }
          box.append(row);
        });
        box.hidden = box.childElementCount < 2;
        const isRight = left > plot.over.clientWidth / 2;
        box.style.left = isRight ? "" : `${left + 12}px`;
        box.style.right = isRight ? `${plot.over.clientWidth - left + 12}px` : "";
      },
      destroy: () => {
        box.remove();
        host.replaceChildren();
      },
    },
  };
}

function axisValues(splits: number[], span: number): string[] {
  return splits.map((at) => {
    const time = clock(at);
    if (span > 2 * 86_400) return day(at).slice(5);
    return span > 600 ? time.slice(0, 5) : time;
  });
}

/** A line per series with the band between the lowest and the highest rank, on a canvas. */
export function TimeChart(props: Props) {
  const { label, names, version, range, isLog, smoothing, height = 168, syncKey } = props;
  const host = useRef<HTMLDivElement>(null);
  const plotRef = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const { width } = useSize(host);
  const theme = useTheme((state) => state.theme);
  const isReady = width > 0;
  const key = names.join("\n");

  useEffect(() => {
    const element = host.current;
    if (element === null || !isReady) return undefined;
    const colours = latest.current.names.map((_, index) => token(COLOURS[index % COLOURS.length] ?? "--series-1"));
    const axis = { stroke: token("--axis"), font: `11px ${token("--font")}`, size: 48 };
    const grid = { stroke: token("--grid"), width: 1 };
    const options: uPlot.Options = {
      width: element.clientWidth,
      height,
      padding: [8, 26, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { size: 6 },
        drag: { x: true, y: false, setScale: false },
        ...(syncKey === undefined ? {} : { sync: { key: syncKey, setSeries: false } }),
      },
      scales: {
        x: { time: true, range: () => [latest.current.range.from, latest.current.range.to] },
        y: isLog
          ? { distr: 3 }
          : { range: (_plot, least, most) => padded(least, most) },
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          ticks: { show: false },
          size: 26,
          space: 66,
          incrs: TICKS_S,
          values: (_plot, splits) => axisValues(splits, latest.current.range.to - latest.current.range.from),
        },
        {
          ...axis,
          grid,
          ticks: { show: false },
          space: 34,
          values: (_plot, splits) => splits.map((value) => (value === null ? "" : axisLabel(value, latest.current.series[0]?.unit ?? ""))),
        },
      ],
      series: [
        {},
        ...colours.flatMap((colour) => [
          { stroke: colour, width: 1.6, spanGaps: false, points: { show: false } },
          { stroke: "transparent", width: 0, points: { show: false } },
          { stroke: "transparent", width: 0, points: { show: false } },
        ]),
      ],
      bands: colours.map((colour, index) => ({
        series: [2 + index * 3, 3 + index * 3] as [number, number],
        fill: faded(colour, 16),
      })),
      plugins: [tooltip(element, () => latest.current)],
      hooks: {
        setSelect: [
          (plot) => {
            const { left, width: selected } = plot.select;
            if (selected < 4) return;
            latest.current.onZoom({ from: plot.posToVal(left, "x"), to: plot.posToVal(left + selected, "x") });
            plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
      },
    };
    const plot = new uPlot(options, dataOf(latest.current) as uPlot.AlignedData, element);
    plotRef.current = plot;
    latest.current.onReady?.(plot);
    return () => {
      plotRef.current = null;
      latest.current.onReady?.(null);
      plot.destroy();
    };
  }, [isReady, theme, isLog, height, key, syncKey]);

  useEffect(() => {
    plotRef.current?.setSize({ width, height });
  }, [width, height]);

  useEffect(() => {
    plotRef.current?.setData(dataOf(latest.current) as uPlot.AlignedData);
  }, [version, smoothing, range.from, range.to]);

  return <div ref={host} className="chart" role="img" aria-label={label} style={{ height }} />;
}

/** Leaves a tenth above and below, and never shows a flat line on the border. */
export function padded(least: number | null, most: number | null): [number, number] {
  if (least === null || most === null || !Number.isFinite(least) || !Number.isFinite(most)) return [0, 1];
  if (least === most) {
    const room = Math.abs(least) * 0.1 || 1;
    return [least >= 0 ? Math.max(least - room, 0) : least - room, most + room];
  }
  const room = (most - least) * 0.1;
  return [least >= 0 ? Math.max(least - room, 0) : least - room, most + room];
}

function axisLabel(value: number, unit: string): string {
  if (unit === "s") return withUnit(value, "s");
  return unit === "bytes" ? withUnit(value, "bytes") : compact(value);
}
