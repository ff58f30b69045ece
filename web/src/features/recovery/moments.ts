import type { RecoveryMoment } from "@/shared/api/types";

export interface Reached {
  name: RecoveryMoment["name"];
  at_s: number;
  after_s: number;
  /** Seconds since the moment before. */
  since_s: number;
}

/** Returns the moments that happened, in the order of their times: workers may start before the generation does. */
export function inOrder(moments: readonly RecoveryMoment[]): Reached[] {
  const found = moments
    .flatMap(({ name, at_s, after_s }) => (at_s === null || after_s === null ? [] : [{ name, at_s, after_s }]))
    .sort((one, other) => one.at_s - other.at_s);
  return found.map((each, index) => ({ ...each, since_s: each.at_s - (found[index - 1]?.at_s ?? each.at_s) }));
}
