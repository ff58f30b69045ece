/** Axes of pictures that are drawn by hand. */
import { compact } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";

export const PADDING = { left: 52, right: 10, top: 8, bottom: 22 };

export interface Scale {
  (value: number): number;
  invert: (pixel: number) => number;
}

/** Maps a domain to pixels; an empty domain is widened. */
export function scale(from: number, to: number, start: number, end: number): Scale {
  const span = to - from || 1;
  const map = ((value: number) => start + ((value - from) / span) * (end - start)) as Scale;
  map.invert = (pixel) => from + ((pixel - start) / (end - start || 1)) * span;
  return map;
}

/** Returns about `num` round values within a domain. */
export function ticks(from: number, to: number, num: number): number[] {
  const span = to - from;
  if (!(span > 0) || !Number.isFinite(span)) return [from];
  const rough = span / Math.max(num, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough) ?? power * 10;
  const first = Math.ceil(from / step - 1e-9) * step;
  const found: number[] = [];
  for (let index = 0; index <= num * 3; index += 1) {
    const value = first + index * step;
    if (value > to + step * 1e-9) break;
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return found;
}

export function font(): string {
  return `11px ${token("--font")}`;
}

interface Frame {
  width: number;
  height: number;
  x: Scale;
  y: Scale;
  xDomain: [number, number];
  yDomain: [number, number];
  format?: (value: number) => string;
}

/** Draws horizontal lines with labels and the values below the horizontal axis. */
export function drawAxes(context: CanvasRenderingContext2D, frame: Frame): void {
  const { width, height, x, y, xDomain, yDomain, format = compact } = frame;
  context.font = font();
  context.fillStyle = token("--axis");
  context.strokeStyle = token("--grid");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of ticks(yDomain[0], yDomain[1], Math.max(Math.floor(height / 48), 2))) {
    const at = Math.round(y(value)) + 0.5;
    context.beginPath();
    context.moveTo(PADDING.left, at);
    context.lineTo(width - PADDING.right, at);
    context.stroke();
    context.fillText(format(value), PADDING.left - 6, at);
  }
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (const value of ticks(xDomain[0], xDomain[1], Math.max(Math.floor(width / 90), 2))) {
    context.fillText(compact(value), x(value), height - 6);
  }
}
