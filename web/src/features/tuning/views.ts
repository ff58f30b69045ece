/** What the pictures of a study are computed from. */
import type { StudyCurve, StudyInfo, StudyTrial, TrialState } from "@/shared/api/types";
import { DASH, number } from "@/shared/format/numbers";

export const TRIAL_STATES: readonly TrialState[] = ["running", "paused", "queued", "finished", "pruned", "failed"];

const STATE_TOKENS: Record<TrialState, `--${string}`> = {
  running: "--series-1",
  paused: "--state-recovering",
  queued: "--state-initializing",
  finished: "--series-3",
  pruned: "--axis",
  failed: "--state-error",
};

/** The design token of the colour of a trial's state. */
export function trialToken(state: TrialState): `--${string}` {
  return STATE_TOKENS[state];
}

/** Returns the number of trials in a state. */
export function numIn(counts: StudyInfo["counts"], state: TrialState): number {
  return counts[state] ?? 0;
}

export type Value = StudyTrial["config"][string];

/** Returns a value of a configuration as people read it. */
export function valueWords(value: Value | undefined): string {
  if (value === undefined) return DASH;
  if (typeof value === "number") return number(value);
  return value === null ? "none" : String(value);
}

/** Returns `learning_rate=0.0031 layers=2`. */
export function configWords(config: StudyTrial["config"]): string {
  return Object.entries(config)
    .map(([name, value]) => `${name}=${valueWords(value)}`)
    .join(" ");
}

/** Returns for each value how good it is among all: 1 for the best, 0 for the worst. Equal values are equally good. */
export function qualities(values: readonly number[], direction: string): number[] {
  const ordered = [...new Set(values)].sort((a, b) => (direction === "max" ? a - b : b - a));
  const place = new Map(ordered.map((value, index) => [value, index]));
  const last = Math.max(ordered.length - 1, 1);
  return values.map((value) => (ordered.length === 1 ? 1 : (place.get(value) ?? 0) / last));
}

/** Returns whether a logarithmic axis can show all values. */
export function isPositive(values: readonly (number | null)[]): boolean {
  return values.every((value) => value === null || value > 0);
}

export interface Nearest {
  trial: number;
  state: TrialState;
  step: number;
  value: number;
}

/** Returns the point of all curves that is nearest to a place in the picture; null if none is near. */
export function nearest(
  curves: readonly StudyCurve[],
  toX: (step: number) => number,
  toY: (value: number) => number,
  at: { x: number; y: number },
  maxPx: number,
): Nearest | null {
  let found: Nearest | null = null;
  let best = maxPx ** 2;
  for (const curve of curves) {
    curve.steps.forEach((step, index) => {
      const value = curve.values[index];
      if (value === null || value === undefined) return;
      const distance = (toX(step) - at.x) ** 2 + (toY(value) - at.y) ** 2;
      if (distance <= best) {
        best = distance;
        found = { trial: curve.trial, state: curve.state, step, value };
      }
    });
  }
  return found;
}

/** Returns the number in a query parameter; undefined if there is none. */
export function trialIn(text: string): number | undefined {
  return /^\d{1,6}$/.test(text) ? Number(text) : undefined;
}

/** The sorts of the table: those of the columns, and `value:NAME` for a metric. */
export function sortOf(text: string): { sort: string; name: string } {
  if (text.startsWith("value:")) return { sort: "value", name: text.slice("value:".length) };
  return ["state", "step", "duration"].includes(text) ? { sort: text, name: "" } : { sort: "trial", name: "" };
}
