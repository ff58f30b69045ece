/** Joins what the coordinator recorded of a checkpoint with what its manifest holds. */
import type { CheckpointLine, StoredCheckpoint } from "@/shared/api/types";
import { count } from "@/shared/format/numbers";

export interface DescentRow {
  line: CheckpointLine;
  /** The manifest; undefined if retention has deleted the checkpoint, or if its files cannot be read from here. */
  stored: StoredCheckpoint | undefined;
}

export function rows(lines: readonly CheckpointLine[], stored: readonly StoredCheckpoint[]): DescentRow[] {
  const byId = new Map(stored.map((each) => [each.id, each]));
  return lines.map((line) => ({ line, stored: byId.get(line.checkpoint_id) }));
}

/** Returns who resumed from a checkpoint in words: `attempt 1, attempt 3`. */
export function resumedBy(line: CheckpointLine): string {
  return line.resumed_by.map((each) => `attempt ${count(each.attempt)}`).join(", ");
}
