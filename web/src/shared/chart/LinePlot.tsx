import { useCallback, useState } from "react";
import { number } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";
import { drawAxes, PADDING, scale } from "./axes";
import { Canvas } from "./Canvas";

export interface Line {
  label: string;
  colour: `--${string}`;
  values: readonly (number | null)[];
  isDashed?: boolean;
}

interface Props {
  label: string;
  xLabel: string;
  x: readonly number[];
  lines: readonly Line[];
  /** Values between which the area is filled. */
  band?: { low: readonly (number | null)[]; high: readonly (number | null)[]; colour: `--${string}` };
  isLog?: boolean;
  height?: number;
}

/** Returns the smallest and largest value. */
export function extent(columns: readonly (readonly (number | null)[])[]): [number, number] {
  let least = Number.POSITIVE_INFINITY;
  let most = Number.NEGATIVE_INFINITY;
  for (const column of columns) {
    for (const value of column) {
      if (value === null || !Number.isFinite(value)) continue;
      least = Math.min(least, value);
      most = Math.max(most, value);
    }
  }
  if (least > most) return [0, 1];
  if (least === most) return [least - (Math.abs(least) * 0.1 || 1), most + (Math.abs(most) * 0.1 || 1)];
  return [least, most];
}

/** Lines over a numeric axis, with the values at the pointer in words below. */
export function LinePlot({ label, xLabel, x, lines, band, isLog = false, height = 180 }: Props) {
  const [at, setAt] = useState<number | null>(null);
  const logged = useCallback(
    (value: number | null) => (isLog ? (value !== null && value > 0 ? Math.log10(value) : null) : value),
    [isLog],
  );
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width, height: tall }: { width: number; height: number }) => {
      const columns = [...lines.map((line) => line.values), ...(band === undefined ? [] : [band.low, band.high])];
      const [least, most] = extent(columns.map((column) => column.map(logged)));
      const room = (most - least) * 0.06;
      const xDomain: [number, number] = [x[0] ?? 0, x.at(-1) ?? 1];
      const yDomain: [number, number] = [least - room, most + room];
      const toX = scale(...xDomain, PADDING.left, width - PADDING.right);
      const toY = scale(...yDomain, tall - PADDING.bottom, PADDING.top);
      const format = isLog ? (value: number) => number(10 ** value, 2) : undefined;
      drawAxes(context, { width, height: tall, x: toX, y: toY, xDomain, yDomain, ...(format ? { format } : {}) });
      if (band !== undefined) {
        context.fillStyle = token(band.colour);
        context.globalAlpha = 0.16;
        context.beginPath();
        const points = x.flatMap((value, index) => {
          const low = logged(band.low[index] ?? null);
          const high = logged(band.high[index] ?? null);
          return low === null || high === null ? [] : [{ px: toX(value), low: toY(low), high: toY(high) }];
        });
        points.forEach(({ px, high }, index) => {
          if (index === 0) context.moveTo(px, high);
          else context.lineTo(px, high);
        });
        for (const { px, low } of points.reverse()) context.lineTo(px, low);
        context.closePath();
        context.fill();
        context.globalAlpha = 1;
      }
      for (const line of lines) {
        context.strokeStyle = token(line.colour);
        context.lineWidth = 1.6;
        context.setLineDash(line.isDashed === true ? [4, 3] : []);
        context.beginPath();
        let isOpen = false;
        x.forEach((value, index) => {
          const found = logged(line.values[index] ?? null);
          if (found === null) {
            isOpen = false;
            return;
          }
          if (isOpen) context.lineTo(toX(value), toY(found));
          else context.moveTo(toX(value), toY(found));
          isOpen = true;
        });
        context.stroke();
        if (x.length <= 60) {
          context.fillStyle = token(line.colour);
          x.forEach((value, index) => {
            const found = logged(line.values[index] ?? null);
            if (found === null) return;
            context.beginPath();
            context.arc(toX(value), toY(found), 2.4, 0, 7);
            context.fill();
          });
        }
      }
      context.setLineDash([]);
      if (at !== null && x[at] !== undefined) {
        context.strokeStyle = token("--border-strong");
        context.beginPath();
        context.moveTo(toX(x[at]), PADDING.top);
        context.lineTo(toX(x[at]), tall - PADDING.bottom);
        context.stroke();
      }
    },
    [at, band, isLog, lines, logged, x],
  );
  const shown = at ?? x.length - 1;
  return (
    <figure className="plot">
      <Canvas
        {...{ label, height, draw }}
        onPoint={(pointer) => {
          if (pointer === null) {
            setAt(null);
            return;
          }
          const wanted = scale(x[0] ?? 0, x.at(-1) ?? 1, PADDING.left, pointer.width - PADDING.right).invert(pointer.x);
          let best = 0;
          x.forEach((value, index) => {
            if (Math.abs(value - wanted) < Math.abs((x[best] ?? 0) - wanted)) best = index;
          });
          setAt(best);
        }}
      />
      <figcaption className="num">
        <span className="muted">
          {xLabel} {number(x[shown])}
        </span>
        {lines.map((line) => (
          <span key={line.label}>
            <span className="dot" style={{ background: `var(${line.colour})` }} aria-hidden="true" /> {line.label}{" "}
            <strong>{number(line.values[shown])}</strong>
          </span>
        ))}
      </figcaption>
    </figure>
  );
}
