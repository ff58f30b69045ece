import { useCallback, useMemo, useState } from "react";
import { getCurves } from "@/shared/api/getCurves";
import type { StudyCurves, StudyInfo } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { drawAxes, PADDING, scale } from "@/shared/chart/axes";
import { Canvas } from "@/shared/chart/Canvas";
import { extent } from "@/shared/chart/LinePlot";
import { count, number } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";
import { Choice } from "@/shared/ui/Choice";
import { Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { useQuery } from "@/shared/url/useQuery";
import { TrialDot } from "./TrialStates";
import { isPositive, nearest, type Nearest, trialToken } from "./views";

const HEIGHT = 240;
const NEAR_PX = 24;

interface Props {
  found: StudyInfo;
  metric: string;
  trial: number | undefined;
}

/** The reports of trials over their steps: running trials and the best ones. */
export function Curves({ found, metric, trial }: Props) {
  const { get, set } = useQuery();
  const { data, error, reload } = useApi(
    `curves ${found.study} ${metric} ${trial ?? ""} ${found.version}`,
    (signal) => getCurves(found.study, metric, trial, signal),
    { keep: true },
  );
  const canBeLog = data !== undefined && data.items.every((curve) => isPositive(curve.values));
  const isLog = canBeLog && get("axis") === "log";
  return (
    <Panel
      title="Learning curves"
      detail={
        data !== undefined && data.num_trials > data.items.length
          ? `${count(data.items.length)} of ${count(data.num_trials)} trials: running ones and the best`
          : undefined
      }
      actions={
        canBeLog ? (
          <Choice
            label="Vertical axis"
            value={isLog ? "log" : "linear"}
            options={[
              { value: "linear", label: "Linear" },
              { value: "log", label: "Log" },
            ]}
            onChange={(axis) => {
              set({ axis: axis === "linear" ? null : axis });
            }}
          />
        ) : undefined
      }
    >
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {data === undefined && error === undefined && <Loading label="Loading the curves" />}
      {data?.items.length === 0 && <p className="muted">No trial has reported yet.</p>}
      {data !== undefined && data.items.length > 0 && <Plot {...{ data, isLog, trial }} />}
    </Panel>
  );
}

function Plot({ data, isLog, trial }: { data: StudyCurves; isLog: boolean; trial: number | undefined }) {
  const [at, setAt] = useState<Nearest | null>(null);
  const { items } = data;
  const frame = useMemo(() => {
    const onAxis = (value: number): number => (isLog ? Math.log10(value) : value);
    const [least, most] = extent(items.map((curve) => curve.values.map((each) => (each === null ? null : onAxis(each)))));
    const room = (most - least) * 0.06;
    const steps = items.flatMap((curve) => [curve.steps[0] ?? 0, curve.steps.at(-1) ?? 0]);
    const xDomain: [number, number] = [Math.min(...steps), Math.max(...steps)];
    const yDomain: [number, number] = [least - room, most + room];
    return {
      xDomain,
      yDomain,
      toX: (width: number) => scale(...xDomain, PADDING.left, width - PADDING.right),
      toY: (height: number) => {
        const linear = scale(...yDomain, height - PADDING.bottom, PADDING.top);
        return { linear, of: (value: number) => linear(onAxis(value)) };
      },
    };
  }, [isLog, items]);
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width, height }: { width: number; height: number }) => {
      const x = frame.toX(width);
      const y = frame.toY(height);
      const format = isLog ? { format: (value: number) => number(10 ** value, 2) } : {};
      const { xDomain, yDomain } = frame;
      drawAxes(context, { width, height, x, y: y.linear, xDomain, yDomain, ...format });
      const marked = at?.trial ?? trial;
      for (const curve of [...items].sort((a, b) => Number(a.trial === marked) - Number(b.trial === marked))) {
        const isMarked = curve.trial === marked;
        context.strokeStyle = isMarked ? token("--series-2") : token(trialToken(curve.state));
        context.fillStyle = context.strokeStyle;
        context.globalAlpha = isMarked || marked === undefined ? 0.9 : 0.35;
        context.lineWidth = isMarked ? 2.4 : 1.2;
        context.setLineDash(curve.state === "pruned" && !isMarked ? [4, 3] : []);
        context.beginPath();
        let isOpen = false;
        curve.steps.forEach((step, index) => {
          const value = curve.values[index];
          if (value === null || value === undefined) {
            isOpen = false;
            return;
          }
          if (isOpen) context.lineTo(x(step), y.of(value));
          else context.moveTo(x(step), y.of(value));
          isOpen = true;
        });
        context.stroke();
        const [only] = curve.values;
        if (curve.steps.length === 1 && only !== null && only !== undefined) {
          context.beginPath();
          context.arc(x(curve.steps[0] ?? 0), y.of(only), 2.4, 0, 7);
          context.fill();
        }
      }
      context.globalAlpha = 1;
      context.setLineDash([]);
    },
    [at, frame, isLog, items, trial],
  );
  const states = [...new Set(items.map((curve) => curve.state))];
  return (
    <figure className="plot">
      <Canvas
        label={`${data.metric} of ${count(items.length)} trials over their steps`}
        height={HEIGHT}
        draw={draw}
        onPoint={(pointer) => {
          setAt(pointer && nearest(items, frame.toX(pointer.width), frame.toY(HEIGHT).of, pointer, NEAR_PX));
        }}
      />
      <figcaption className="num">
        {at === null
          ? [
              <span key="axes">
                → step, ↑ {data.metric}
              </span>,
              ...states.map((state) => (
                <span key={state}>
                  <TrialDot state={state} /> {state}
                </span>
              )),
            ]
          : `trial ${at.trial} (${at.state}), step ${count(at.step)}, ${data.metric} ${number(at.value)}`}
      </figcaption>
    </figure>
  );
}
