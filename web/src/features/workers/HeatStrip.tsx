import { useEffect, useRef } from "react";
import { duration, number } from "@/shared/format/numbers";
import { token, useTheme } from "@/shared/theme/theme";
import { stateToken, stateWords } from "@/shared/ui/Status";
import { ageHeat, NUM_CELLS, type Strip } from "./strips";

const CELL = 3;
const LANE = 7;
const GAP = 2;
const WIDTH = NUM_CELLS * CELL;
const HEIGHT = 3 * LANE + 2 * GAP;

/** Blends two colours given as #rrggbb. */
export function blend(from: string, to: string, share: number): string {
  const part = (colour: string, at: number): number => Number.parseInt(colour.slice(at, at + 2), 16);
  const mixed = [1, 3, 5].map((at) => Math.round(part(from, at) + (part(to, at) - part(from, at)) * share));
  return `rgb(${mixed.join(" ")})`;
}

interface Props {
  strip: Strip | undefined;
  version: number;
}

/** Three lanes, newest at the right: state, step rate, heartbeat age. The step rate is orange where it was at half of the
 *  median or below: the median of that moment, because a job that gets faster has no stragglers for it. */
export function HeatStrip({ strip, version }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const theme = useTheme((state) => state.theme);
  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (element === null || context === null || context === undefined || strip === undefined) return;
    const scale = window.devicePixelRatio || 1;
    element.width = WIDTH * scale;
    element.height = HEIGHT * scale;
    context.scale(scale, scale);
    context.clearRect(0, 0, WIDTH, HEIGHT);
    const fresh = token("--age-fresh");
    const old = token("--age-old");
    const sunken = token("--sunken");
    context.fillStyle = sunken;
    for (let lane = 0; lane < 3; lane += 1) context.fillRect(0, lane * (LANE + GAP), WIDTH, LANE);
    const first = NUM_CELLS - strip.cells.length;
    strip.cells.forEach((cell, index) => {
      const x = (first + index) * CELL;
      context.fillStyle = token(stateToken(cell.state));
      context.fillRect(x, 0, CELL, LANE);
      if (cell.isSuspect) {
        context.fillStyle = token("--suspect");
        context.fillRect(x, LANE - 3, CELL, 3);
      }
      if (cell.stepsPerS !== null && cell.medianPerS !== null && cell.medianPerS > 0) {
        const slowness = Math.min(Math.max((1 - cell.stepsPerS / cell.medianPerS) * 2, 0), 1);
        context.fillStyle = blend(fresh, old, slowness);
        context.fillRect(x, LANE + GAP, CELL, LANE);
      }
      context.fillStyle = blend(fresh, old, ageHeat(cell.silentS));
      context.fillRect(x, 2 * (LANE + GAP), CELL, LANE);
    });
  }, [strip, version, theme]);
  const last = strip?.cells.at(-1);
  const words =
    last === undefined
      ? "no samples yet"
      : `${stateWords(last.state)}, ${last.stepsPerS === null ? "no step rate yet" : `${number(last.stepsPerS, 3)} steps/s`}, heartbeat ${duration(last.silentS)} ago`;
  return (
    <div role="img" aria-label={words} title={words}>
      <canvas ref={canvas} className="strip" aria-hidden="true" />
    </div>
  );
}
