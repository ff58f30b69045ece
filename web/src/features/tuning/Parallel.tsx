import { useCallback } from "react";
import { getParallel } from "@/shared/api/getParallel";
import type { StudyInfo, StudyParallel } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { font, scale } from "@/shared/chart/axes";
import { Canvas } from "@/shared/chart/Canvas";
import { extent } from "@/shared/chart/LinePlot";
import { compact, count } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";
import { Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { Key } from "./BestSoFar";
import { numIn, qualities } from "./views";

const HEIGHT = 300;
const TOP = 34;
const BOTTOM = 24;
const SIDE = 64;
/** The narrowest distance of two axes; a narrow window scrolls the picture. */
const AXIS_PX = 96;
/** Trials that are drawn in the colour of the best. */
const BEST_FROM = 0.9;

interface Props {
  found: StudyInfo;
  metric: string;
  trial: number | undefined;
}

/** Each finished trial as a line through its parameters and its result. */
export function Parallel({ found, metric, trial }: Props) {
  const { data, error, reload } = useApi(
    // Lines follow from trials that have ended, not from reports.
    `parallel ${found.study} ${metric} ${trial ?? ""} ${numIn(found.counts, "finished")}`,
    (signal) => getParallel(found.study, metric, trial, signal),
    { keep: true },
  );
  return (
    <Panel title="Parallel coordinates" detail={data === undefined ? undefined : detail(data)}>
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {data === undefined && error === undefined && <Loading label="Loading the configurations" />}
      {data?.items.length === 0 && <p className="muted">No trial has finished yet.</p>}
      {data !== undefined && data.items.length > 0 && <Plot data={data} trial={trial} />}
    </Panel>
  );
}

function detail(data: StudyParallel): string | undefined {
  const words = [
    data.num_trials > data.items.length
      ? `${count(data.items.length)} of ${count(data.num_trials)} finished trials: the best and a choice of the others`
      : "",
    data.num_axes > data.axes.length ? `the first ${data.axes.length} of ${data.num_axes} parameters` : "",
  ].filter((each) => each !== "");
  return words.length === 0 ? undefined : words.join(" · ");
}

function Plot({ data, trial }: { data: StudyParallel; trial: number | undefined }) {
  const { axes, items } = data;
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width, height }: { width: number; height: number }) => {
      const values = items.map((line) => line.value);
      const quality = qualities(values, data.direction);
      const [least, most] = extent([values]);
      const num = axes.length;
      const x = scale(0, Math.max(num, 1), SIDE, width - SIDE);
      const y = scale(0, 1, height - BOTTOM, TOP);
      const result = scale(least, most, height - BOTTOM, TOP);
      const order = items.map((_, index) => index).sort((a, b) => (quality[a] ?? 0) - (quality[b] ?? 0));
      const stroke = (index: number, colour: `--${string}`, alpha: number, lineWidth: number): void => {
        const line = items[index];
        if (line === undefined) return;
        context.strokeStyle = token(colour);
        context.globalAlpha = alpha;
        context.lineWidth = lineWidth;
        context.beginPath();
        let isOpen = false;
        const to = (px: number, py: number): void => {
          if (isOpen) context.lineTo(px, py);
          else context.moveTo(px, py);
          isOpen = true;
        };
        line.positions.forEach((position, axis) => {
          if (position === null) isOpen = false;
          else to(x(axis), y(position));
        });
        to(x(num), result(line.value));
        context.stroke();
      };
      for (const index of order) {
        const good = quality[index] ?? 0;
        stroke(index, good >= BEST_FROM ? "--series-2" : "--series-1", 0.12 + 0.7 * good ** 2, good >= BEST_FROM ? 1.6 : 1);
      }
      const chosen = items.findIndex((line) => line.trial === trial);
      if (chosen >= 0) stroke(chosen, "--text", 1, 2.6);
      context.globalAlpha = 1;
      context.font = font();
      for (let axis = 0; axis <= num; axis += 1) {
        const px = Math.round(x(axis)) + 0.5;
        context.strokeStyle = token("--border-strong");
        context.lineWidth = 1;
        context.beginPath();
        context.moveTo(px, TOP);
        context.lineTo(px, height - BOTTOM);
        context.stroke();
        const found = axes[axis];
        const room = (x(1) - x(0)) * 0.96;
        context.textAlign = "center";
        context.textBaseline = "alphabetic";
        context.fillStyle = token("--text");
        context.fillText(fitted(context, found?.name ?? data.metric, room), px, 12);
        context.fillStyle = token("--text-3");
        if (found !== undefined && found.labels.length > 0) {
          context.textAlign = "left";
          context.textBaseline = "middle";
          // Lines run through the labels, so each has an edge in the colour behind it.
          context.strokeStyle = token("--surface");
          context.lineWidth = 4;
          context.lineJoin = "round";
          found.labels.forEach((label, index) => {
            const text = fitted(context, label, room * 0.7);
            const at = y((index + 0.5) / found.labels.length);
            context.strokeText(text, px + 6, at);
            context.fillText(text, px + 6, at);
          });
        } else {
          context.fillText(fitted(context, found?.high ?? compact(most), room), px, TOP - 5);
          context.textBaseline = "top";
          context.fillText(fitted(context, found?.low ?? compact(least), room), px, height - BOTTOM + 5);
        }
      }
    },
    [axes, data.direction, data.metric, items, trial],
  );
  return (
    <figure className="plot">
      {/* A region that scrolls must be reachable from the keyboard. */}
      {/* eslint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="tuning-scroll" tabIndex={0} role="group" aria-label="Parallel coordinates">
        <div style={{ minWidth: axes.length * AXIS_PX + 2 * SIDE }}>
          <Canvas
            label={`${count(items.length)} finished trials as lines through ${axes.map((axis) => axis.name).join(", ")} and ${data.metric}`}
            height={HEIGHT}
            draw={draw}
          />
        </div>
      </div>
      <figcaption>
        <span>
          <Key colour="--series-2" /> the best tenth
        </span>
        <span>
          <Key colour="--series-1" /> others; stronger is better
        </span>
        {items.some((line) => line.trial === trial) && (
          <span>
            <Key colour="--text" /> trial {trial}
          </span>
        )}
      </figcaption>
    </figure>
  );
}

/** Returns a text that fits into a width, with an ellipsis if it is cut. */
function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}
