import type { IconName } from "@/shared/ui/Icon";

interface Kind {
  label: string;
  icon: IconName;
  look: "quiet" | "ok" | "info" | "warning" | "error";
}

/** How each kind of event is shown; the kinds are those of the journal. */
export const KINDS: Record<string, Kind> = {
  WorkerJoined: { label: "Worker joined", icon: "workers", look: "ok" },
  WorkerLeft: { label: "Worker left", icon: "error", look: "error" },
  GenerationStarted: { label: "Generation started", icon: "follow", look: "warning" },
  DatasetRegistered: { label: "Dataset registered", icon: "folder", look: "info" },
  ShardsAssigned: { label: "Shards assigned", icon: "compare", look: "quiet" },
  ShardsDone: { label: "Shards done", icon: "ok", look: "quiet" },
  EpochAdvanced: { label: "Epoch advanced", icon: "chevron", look: "info" },
  BarrierReleased: { label: "Barrier released", icon: "ok", look: "quiet" },
  CheckpointAcked: { label: "Checkpoint acknowledged", icon: "checkpoints", look: "quiet" },
  CheckpointCommitted: { label: "Checkpoint committed", icon: "checkpoints", look: "ok" },
  CheckpointAborted: { label: "Checkpoint aborted", icon: "warning", look: "warning" },
  CommandSent: { label: "Command sent", icon: "chevron", look: "info" },
  CommandsAcked: { label: "Commands acknowledged", icon: "ok", look: "quiet" },
  NumbersSkipped: { label: "Numbers skipped", icon: "info", look: "quiet" },
  JobDropped: { label: "Job dropped", icon: "close", look: "warning" },
};

export function kindOf(name: string): Kind {
  return KINDS[name] ?? { label: name, icon: "info", look: "quiet" };
}
