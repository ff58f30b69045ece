/** Which series are drawn together, and in which order. */
export interface Group {
  key: string;
  title: string;
  names: string[];
}

/** Drawn elsewhere: workers by state as a bar, step and epoch as figures, parameter servers on their page. The metric
 *  `rows_per_s` of each rank is part of the chart of their sum. */
const NOT_DRAWN = /^(workers\.|servers\.|step$|epoch$|metric:rows_per_s$)/;
const FIRST = ["steps_per_s", "rows_per_s"];
const LAST = ["checkpoint_age_s"];
const LOSS = /(^|[/_:.-])loss$/i;

function rank(name: string): number {
  const first = FIRST.indexOf(name);
  if (first >= 0) return first;
  if (LAST.includes(name)) return 100;
  return LOSS.test(name) ? 10 : 20;
}

/** Returns one chart per series of a job: throughput, losses, other metrics by name, then the rest. */
export function groups(names: readonly string[], titleOf: (name: string) => string): Group[] {
  return names
    .filter((name) => !NOT_DRAWN.test(name))
    .sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))
    .map((name) => ({ key: name, title: titleOf(name), names: [name] }));
}

/** The charts of the coordinator itself. */
export const COORDINATOR: readonly Group[] = [
  { key: "requests", title: "Coordinator", names: ["requests_per_s"] },
  { key: "barriers", title: "Barrier latency", names: ["barrier_p50_s", "barrier_p99_s"] },
];
