import type { JobState, Level, WorkerState } from "@/shared/api/types";
import { Icon } from "./Icon";

export const LEVEL_WORDS: Record<Level, string> = { ok: "Healthy", warning: "Warning", error: "Error" };

export function LevelIcon({ level }: { level: Level }) {
  return (
    <span className={`level ${level}`}>
      <Icon name={level} />
      <span className="sr-only">{LEVEL_WORDS[level]}</span>
    </span>
  );
}

export const WORKER_STATES: readonly WorkerState[] = [
  ...(["TRAINING", "LOADING_DATA", "CHECKPOINTING", "RECOVERING", "INITIALIZING", "IDLE", "ERROR"] as const),
];

const STATE_WORDS: Record<WorkerState, string> = {
  TRAINING: "training",
  LOADING_DATA: "loading data",
  CHECKPOINTING: "saving",
  RECOVERING: "recovering",
  INITIALIZING: "starting",
  IDLE: "idle",
  ERROR: "error",
};

const STATE_TOKENS: Record<WorkerState, `--${string}`> = {
  TRAINING: "--state-training",
  LOADING_DATA: "--state-loading",
  CHECKPOINTING: "--state-checkpointing",
  RECOVERING: "--state-recovering",
  INITIALIZING: "--state-initializing",
  IDLE: "--state-idle",
  ERROR: "--state-error",
};

export function stateWords(state: WorkerState): string {
  return STATE_WORDS[state];
}

/** The design token of a worker state's colour. */
export function stateToken(state: WorkerState): `--${string}` {
  return STATE_TOKENS[state];
}

export function StateDot({ state }: { state: WorkerState }) {
  return <span className="dot" style={{ background: `var(${stateToken(state)})` }} aria-hidden="true" />;
}

const JOB_LOOK: Record<JobState, string> = {
  waiting: "quiet",
  starting: "quiet",
  loading: "info",
  training: "ok",
  saving: "info",
  recovering: "warning",
  idle: "quiet",
  error: "error",
};

export function JobBadge({ state }: { state: JobState }) {
  return <span className={`badge ${JOB_LOOK[state]}`}>{state}</span>;
}

interface StatesProps {
  counts: Partial<Record<WorkerState, number>>;
  legend?: boolean;
}

/** Workers by state as one bar, in the order of the legend. */
export function StatesBar({ counts, legend = false }: StatesProps) {
  const present = WORKER_STATES.filter((state) => (counts[state] ?? 0) > 0);
  const words = present.map((state) => `${counts[state] ?? 0} ${stateWords(state)}`).join(", ");
  return (
    <div className="states">
      <div className="states-bar" role="img" aria-label={words === "" ? "no workers" : words} title={words}>
        {present.map((state) => (
          <span key={state} style={{ flexGrow: counts[state] ?? 0, background: `var(${stateToken(state)})` }} />
        ))}
      </div>
      {legend && (
        <ul className="states-legend">
          {present.map((state) => (
            <li key={state}>
              <StateDot state={state} />
              <span className="num">{counts[state]}</span> {stateWords(state)}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
