/** Joins what the coordinator recorded of a checkpoint with what its manifest holds. */
import type { CheckpointLine, StoredCheckpoint } from "@/shared/api/types";

export interface DescentRow {
  line: CheckpointLine;
  /** The manifest; undefined if retention has deleted the checkpoint, or if its files cannot be read from here. */
  stored: StoredCheckpoint | undefined;
}

export function rows(lines: readonly CheckpointLine[], stored: readonly StoredCheckpoint[]): DescentRow[] {
  const byId = new Map(stored.map((each) => [each.id, each]));
  return lines.map((line) => ({ line, stored: byId.get(line.checkpoint_id) }));
}
