import { useCallback, useState } from "react";
import { drawAxes, PADDING, scale } from "@/shared/chart/axes";
import { Canvas } from "@/shared/chart/Canvas";
import { count, number, percent } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";

export interface Bars {
  label: string;
  colour: `--${string}`;
  counts: readonly number[];
}

interface Props {
  label: string;
  edges: readonly number[];
  bars: readonly Bars[];
  isLog: boolean;
  height?: number;
}

/** Distributions over common bins; two are drawn as outlines over each other. */
export function Histogram({ label, edges, bars, isLog, height = 190 }: Props) {
  const [at, setAt] = useState<number | null>(null);
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width, height: tall }: { width: number; height: number }) => {
      const height_ = (value: number): number => (isLog ? Math.log10(value + 1) : value);
      const most = Math.max(...bars.flatMap((each) => each.counts.map(height_)), 1);
      const xDomain: [number, number] = [edges[0] ?? 0, edges.at(-1) ?? 1];
      const yDomain: [number, number] = [0, most * 1.05];
      const x = scale(...xDomain, PADDING.left, width - PADDING.right);
      const y = scale(...yDomain, tall - PADDING.bottom, PADDING.top);
      const format = isLog ? (value: number) => number(10 ** value - 1, 2) : undefined;
      drawAxes(context, { width, height: tall, x, y, xDomain, yDomain, ...(format ? { format } : {}) });
      for (const each of bars) {
        context.fillStyle = token(each.colour);
        context.strokeStyle = token(each.colour);
        context.lineWidth = 1.5;
        context.globalAlpha = bars.length > 1 ? 0.22 : 0.85;
        each.counts.forEach((value, index) => {
          const left = x(edges[index] ?? 0);
          const right = x(edges[index + 1] ?? 0);
          const gap = bars.length === 1 && right - left > 3 ? 1 : 0;
          context.fillRect(left, y(height_(value)), right - left - gap, y(0) - y(height_(value)));
        });
        context.globalAlpha = 1;
        if (bars.length > 1) {
          context.beginPath();
          context.moveTo(x(edges[0] ?? 0), y(0));
          each.counts.forEach((value, index) => {
            context.lineTo(x(edges[index] ?? 0), y(height_(value)));
            context.lineTo(x(edges[index + 1] ?? 0), y(height_(value)));
          });
          context.stroke();
        }
      }
      if (at !== null) {
        context.fillStyle = token("--text");
        context.globalAlpha = 0.1;
        context.fillRect(x(edges[at] ?? 0), PADDING.top, x(edges[at + 1] ?? 0) - x(edges[at] ?? 0), y(0) - PADDING.top);
        context.globalAlpha = 1;
      }
    },
    [at, bars, edges, isLog],
  );
  const total = bars[0]?.counts.reduce((sum, value) => sum + value, 0) ?? 0;
  return (
    <figure className="plot">
      <Canvas
        {...{ label, height, draw }}
        onPoint={(pointer) => {
          if (pointer === null) {
            setAt(null);
            return;
          }
          const num = edges.length - 1;
          const inside = (pointer.x - PADDING.left) / (pointer.width - PADDING.left - PADDING.right);
          const index = Math.floor(inside * num);
          setAt(index >= 0 && index < num ? index : null);
        }}
      />
      <figcaption className="num">
        {at === null ? (
          <span className="muted">{count(edges.length - 1)} bins; point at one to read it</span>
        ) : (
          <span className="muted">
            {number(edges[at])} to {number(edges[at + 1])}
          </span>
        )}
        {bars.map((each) => (
          <span key={each.label}>
            <span className="dot" style={{ background: `var(${each.colour})` }} aria-hidden="true" /> {each.label}
            {at !== null && (
              <>
                {" "}
                <strong>{count(each.counts[at])}</strong>
                {bars.length === 1 && total > 0 && ` (${percent((each.counts[at] ?? 0) / total)})`}
              </>
            )}
          </span>
        ))}
      </figcaption>
    </figure>
  );
}
