/** The place of each checkpoint in the timeline. */
import type { StoredCheckpoint } from "@/shared/api/types";

export interface Spot {
  item: StoredCheckpoint;
  /** From 0 (oldest) to 1 (newest). */
  x: number;
  lane: number;
}

/** Returns the spots, oldest first: by time, in a lane per branch, so that a resume from an earlier step is visible. */
export function spots(items: readonly StoredCheckpoint[]): Spot[] {
  const oldest = items.slice().sort((a, b) => a.created_at_s - b.created_at_s);
  const first = oldest[0]?.created_at_s ?? 0;
  const span = (oldest.at(-1)?.created_at_s ?? 0) - first;
  const branches = [...new Set(oldest.map((item) => item.branch))].sort((a, b) => a - b);
  return oldest.map((item) => ({
    item,
    x: span > 0 ? (item.created_at_s - first) / span : 0.5,
    lane: branches.indexOf(item.branch),
  }));
}

/** Returns the radius of a mark, by area: a delta of a hundredth of the state is a tenth as wide, but stays visible. */
export function radius(sizeBytes: number, largest: number): number {
  return 4 + 6 * Math.sqrt(largest > 0 ? sizeBytes / largest : 1);
}
