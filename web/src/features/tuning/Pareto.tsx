import { useCallback, useState } from "react";
import { getPareto } from "@/shared/api/getPareto";
import type { StudyInfo, StudyPareto } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { drawAxes, PADDING, type Scale, scale } from "@/shared/chart/axes";
import { Canvas } from "@/shared/chart/Canvas";
import { extent } from "@/shared/chart/LinePlot";
import { count, number } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";
import { Select } from "@/shared/ui/Choice";
import { Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { useQuery } from "@/shared/url/useQuery";
import { Key } from "./BestSoFar";
import { numIn } from "./views";

const HEIGHT = 260;
const NEAR_PX = 24;

interface Props {
  found: StudyInfo;
  trial: number | undefined;
}

/** Two metrics of every finished trial, and which trials no other one dominates. */
export function Pareto({ found, trial }: Props) {
  const { get, set } = useQuery();
  const names = found.reported;
  const x = names.find((each) => each === get("x")) ?? names[0] ?? "";
  const y = names.find((each) => each === get("y")) ?? names.find((each) => each !== x) ?? "";
  const { data, error, reload } = useApi(
    `pareto ${found.study} ${x} ${y} ${numIn(found.counts, "finished")}`,
    (signal) => getPareto(found.study, x, y, signal),
    { keep: true },
  );
  const hasFront = found.metrics.length > 1;
  return (
    <Panel
      title={hasFront ? "Pareto front" : "Two metrics"}
      detail={
        data !== undefined && data.num_trials > data.items.length
          ? `${count(data.items.length)} of ${count(data.num_trials)} finished trials`
          : undefined
      }
      actions={
        names.length > 2 ? (
          <>
            {(["x", "y"] as const).map((axis) => (
              <Select
                key={axis}
                label={axis === "x" ? "Horizontal axis" : "Vertical axis"}
                value={axis === "x" ? x : y}
                options={names.map((each) => ({ value: each, label: each }))}
                onChange={(value) => {
                  set({ [axis]: value });
                }}
              />
            ))}
          </>
        ) : undefined
      }
    >
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {data === undefined && error === undefined && <Loading label="Loading the front" />}
      {data?.items.length === 0 && <p className="muted">No trial has finished yet.</p>}
      {data !== undefined && data.items.length > 0 && <Plot {...{ data, trial, hasFront }} />}
    </Panel>
  );
}

function Plot({ data, trial, hasFront }: { data: StudyPareto; trial: number | undefined; hasFront: boolean }) {
  const [at, setAt] = useState<number | null>(null);
  const { items } = data;
  const scales = useCallback(
    (width: number, height: number): { x: Scale; y: Scale; xDomain: [number, number]; yDomain: [number, number] } => {
      const wide = ([least, most]: [number, number]): [number, number] => {
        const room = (most - least) * 0.06;
        return [least - room, most + room];
      };
      const xDomain = wide(extent([items.map((each) => each.x)]));
      const yDomain = wide(extent([items.map((each) => each.y)]));
      return {
        x: scale(...xDomain, PADDING.left, width - PADDING.right),
        y: scale(...yDomain, height - PADDING.bottom, PADDING.top),
        xDomain,
        yDomain,
      };
    },
    [items],
  );
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width, height }: { width: number; height: number }) => {
      const found = scales(width, height);
      drawAxes(context, { width, height, ...found });
      const front = items.filter((each) => each.is_best).sort((a, b) => a.x - b.x);
      if (hasFront) {
        context.strokeStyle = token("--series-2");
        context.lineWidth = 1.2;
        context.setLineDash([4, 3]);
        context.beginPath();
        front.forEach((each) => {
          context.lineTo(found.x(each.x), found.y(each.y));
        });
        context.stroke();
        context.setLineDash([]);
      }
      for (const each of items) {
        context.fillStyle = token(each.is_best ? "--series-2" : "--series-1");
        context.globalAlpha = each.is_best ? 1 : 0.5;
        context.beginPath();
        if (each.is_best) context.rect(found.x(each.x) - 3.5, found.y(each.y) - 3.5, 7, 7);
        else context.arc(found.x(each.x), found.y(each.y), 2.6, 0, 7);
        context.fill();
      }
      context.globalAlpha = 1;
      const marked = at === null ? items.find((each) => each.trial === trial) : items[at];
      if (marked !== undefined) {
        context.strokeStyle = token("--text");
        context.lineWidth = 1.5;
        context.beginPath();
        context.arc(found.x(marked.x), found.y(marked.y), 7, 0, 7);
        context.stroke();
      }
    },
    [at, hasFront, items, scales, trial],
  );
  const shown = at === null ? undefined : items[at];
  return (
    <figure className="plot">
      <Canvas
        label={`${data.x} and ${data.y} of ${count(items.length)} finished trials`}
        height={HEIGHT}
        draw={draw}
        onPoint={(pointer) => {
          if (pointer === null) {
            setAt(null);
            return;
          }
          const found = scales(pointer.width, HEIGHT);
          let nearest: number | null = null;
          let best = NEAR_PX ** 2;
          items.forEach((each, index) => {
            const distance = (found.x(each.x) - pointer.x) ** 2 + (found.y(each.y) - pointer.y) ** 2;
            if (distance <= best) {
              best = distance;
              nearest = index;
            }
          });
          setAt(nearest);
        }}
      />
      <figcaption className="num">
        {shown === undefined ? (
          <>
            <span>
              → {data.x}, ↑ {data.y}
            </span>
            <span>
              <Key colour="--series-2" /> {hasFront ? "not dominated (squares)" : "the best"}
            </span>
          </>
        ) : (
          `trial ${shown.trial}: ${data.x} ${number(shown.x)}, ${data.y} ${number(shown.y)}`
        )}
      </figcaption>
    </figure>
  );
}
