import { useCallback, useState } from "react";
import { getStudyHistory } from "@/shared/api/getStudyHistory";
import type { StudyHistory, StudyInfo } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { drawAxes, PADDING, type Scale, scale } from "@/shared/chart/axes";
import { Canvas } from "@/shared/chart/Canvas";
import { extent } from "@/shared/chart/LinePlot";
import { count, number } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";
import { Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";

const HEIGHT = 240;

interface Props {
  found: StudyInfo;
  metric: string;
}

/** The result of each finished trial, and the best so far. */
export function BestSoFar({ found, metric }: Props) {
  const { data, error, reload } = useApi(
    `history ${found.study} ${metric} ${found.version}`,
    (signal) => getStudyHistory(found.study, metric, signal),
    { keep: true },
  );
  const last = data?.best.at(-1);
  return (
    <Panel
      title="Best so far"
      detail={last === undefined ? undefined : `${data?.metric} ${number(last.value)} by trial ${last.trial}`}
    >
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {data === undefined && error === undefined && <Loading label="Loading the results" />}
      {data?.results.length === 0 && <p className="muted">No trial has finished yet.</p>}
      {data !== undefined && data.results.length > 0 && <Plot data={data} />}
    </Panel>
  );
}

function Plot({ data }: { data: StudyHistory }) {
  const [at, setAt] = useState<number | null>(null);
  const { results, best, num_ended: numEnded } = data;
  const toX = useCallback(
    (width: number): Scale => scale(1, Math.max(numEnded, 2), PADDING.left, width - PADDING.right),
    [numEnded],
  );
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width, height }: { width: number; height: number }) => {
      const [least, most] = extent([results.map((each) => each.value)]);
      const room = (most - least) * 0.06;
      const yDomain: [number, number] = [least - room, most + room];
      const x = toX(width);
      const y = scale(...yDomain, height - PADDING.bottom, PADDING.top);
      drawAxes(context, { width, height, x, y, xDomain: [1, Math.max(numEnded, 2)], yDomain });
      context.fillStyle = token("--series-3");
      context.globalAlpha = 0.55;
      for (const each of results) {
        context.beginPath();
        context.arc(x(each.num_ended), y(each.value), 2.2, 0, 7);
        context.fill();
      }
      context.globalAlpha = 1;
      context.strokeStyle = token("--series-2");
      context.lineWidth = 1.8;
      context.beginPath();
      best.forEach((each, index) => {
        const px = x(each.num_ended);
        const before = best[index - 1];
        if (before === undefined) context.moveTo(px, y(each.value));
        else {
          context.lineTo(px, y(before.value));
          context.lineTo(px, y(each.value));
        }
      });
      const end = best.at(-1);
      if (end !== undefined) context.lineTo(x(numEnded), y(end.value));
      context.stroke();
      const shown = at === null ? undefined : results[at];
      if (shown !== undefined) {
        context.strokeStyle = token("--text");
        context.beginPath();
        context.arc(x(shown.num_ended), y(shown.value), 4.5, 0, 7);
        context.stroke();
      }
    },
    [at, best, numEnded, results, toX],
  );
  const shown = at === null ? undefined : results[at];
  return (
    <figure className="plot">
      <Canvas
        label={`Results of ${count(results.length)} finished trials in the order of their ends, and the best so far`}
        height={HEIGHT}
        draw={draw}
        onPoint={(pointer) => {
          if (pointer === null) {
            setAt(null);
            return;
          }
          const wanted = toX(pointer.width).invert(pointer.x);
          let nearest = 0;
          results.forEach((each, index) => {
            const before = results[nearest]?.num_ended ?? 0;
            if (Math.abs(each.num_ended - wanted) < Math.abs(before - wanted)) nearest = index;
          });
          setAt(nearest);
        }}
      />
      <figcaption className="num">
        {shown === undefined ? (
          <>
            <span>→ ended trials, ↑ {data.metric}</span>
            <span>
              <Key colour="--series-3" /> result of a trial
            </span>
            <span>
              <Key colour="--series-2" /> best so far
            </span>
          </>
        ) : (
          <span>
            trial {shown.trial}, {data.metric} <strong>{number(shown.value)}</strong>, {count(shown.num_ended)} ended
          </span>
        )}
      </figcaption>
    </figure>
  );
}

export function Key({ colour }: { colour: `--${string}` }) {
  return <span className="dot" style={{ background: `var(${colour})` }} aria-hidden="true" />;
}
