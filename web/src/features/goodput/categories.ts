import type { GoodputCategory, GoodputEntry } from "@/shared/api/types";

export interface CategoryInfo {
  name: GoodputCategory;
  label: string;
  meaning: string;
}

/** The parts of the ledger in the order of the bar. Their colours are classes of goodput.css. */
export const CATEGORIES: readonly CategoryInfo[] = [
  { name: "computing", label: "Computing", meaning: "steps made for the first time" },
  { name: "repeated", label: "Steps computed twice", meaning: "steps that an earlier attempt had already made" },
  { name: "data", label: "Waiting for data", meaning: "inside next() of the loader" },
  { name: "checkpoint", label: "Checkpoint stall", meaning: "in a save, until training continues" },
  { name: "barriers", label: "Barriers and stragglers", meaning: "waiting for other ranks" },
  { name: "starting", label: "Starting", meaning: "until the first step of the run" },
  { name: "recovering", label: "Recovering", meaning: "from a failure to the next first step" },
  { name: "unknown", label: "Unknown", meaning: "not measured, such as the last second of a killed worker" },
];

/** Returns the share of a part, 0 for an entry without any time. */
export function share(entry: GoodputEntry, name: GoodputCategory): number {
  return entry.total_s > 0 ? (entry.parts_s[name] ?? 0) / entry.total_s : 0;
}
