/** What the page knows of the coordinator now: the last overview, brought up to date by the live stream. */
import { create } from "zustand";
import type {
  CoordinatorFigures,
  EventLine,
  HealthState,
  JobSummary,
  LiveEvents,
  Overview,
  Points,
  RunEnd,
  WorkersChanged,
} from "@/shared/api/types";
import type { Connection, LiveName } from "./stream";

/** Bounds on what the tab keeps, so that its memory stays flat however long it is open. */
const MAX_RECENT_EVENTS = 200;
const MAX_LIVE_JOBS = 500;

export interface LiveState {
  connection: Connection;
  retryAtMs: number;
  version: string;
  /** Rises if everything must be loaded again. */
  epoch: number;
  atS: number;
  figures: CoordinatorFigures | undefined;
  health: HealthState | undefined;
  jobs: JobSummary[];
  numJobs: number;
  recentEvents: EventLine[];
  /** The end of the run whose page this is; undefined while it is active. */
  ended: RunEnd | undefined;
}

export const EMPTY: LiveState = {
  connection: "connecting",
  retryAtMs: 0,
  version: "",
  epoch: 0,
  atS: 0,
  figures: undefined,
  health: undefined,
  jobs: [],
  numJobs: 0,
  recentEvents: [],
  ended: undefined,
};

export const useLive = create<LiveState>()(() => EMPTY);

/** Returns the state after a fresh overview. */
export function withOverview(state: LiveState, overview: Overview): LiveState {
  return {
    ...state,
    version: overview.version,
    epoch: state.epoch + 1,
    atS: overview.at_s,
    figures: overview,
    health: overview.health,
    jobs: overview.jobs.items,
    numJobs: overview.jobs.total,
    ended: overview.ended ?? undefined,
  };
}

/** Returns the state after a message of the stream; the same object if the message does not change it. */
export function withMessage<Name extends LiveName>(state: LiveState, name: Name, data: LiveEvents[Name]): LiveState {
  switch (name) {
    case "hello":
      return { ...state, version: (data as LiveEvents["hello"]).version };
    case "health":
      return { ...state, health: data as LiveEvents["health"] };
    case "coordinator": {
      const figures = data as LiveEvents["coordinator"];
      return { ...state, figures, atS: figures.at_s, numJobs: figures.num_jobs };
    }
    case "job": {
      const { job, at_s } = data as LiveEvents["job"];
      return { ...state, atS: at_s, jobs: withJob(state.jobs, job) };
    }
    case "gone": {
      const { job_id } = data as LiveEvents["gone"];
      return { ...state, jobs: state.jobs.filter((job) => job.job_id !== job_id) };
    }
    case "events": {
      const { items } = data as LiveEvents["events"];
      const newest = state.recentEvents[0]?.seq ?? 0;
      const fresh = items.filter((event) => event.seq > newest).reverse();
      return { ...state, recentEvents: [...fresh, ...state.recentEvents].slice(0, MAX_RECENT_EVENTS) };
    }
    default:
      return state;
  }
}

function withJob(jobs: JobSummary[], job: JobSummary): JobSummary[] {
  const at = jobs.findIndex((each) => each.job_id === job.job_id);
  if (at < 0) return [job, ...jobs].slice(0, MAX_LIVE_JOBS);
  const changed = jobs.slice();
  changed[at] = job;
  return changed;
}

/** Messages that a page takes as they come and nobody keeps. */
interface Passing {
  points: Points;
  workers: WorkersChanged;
  events: LiveEvents["events"];
}

const listeners: { [Name in keyof Passing]: Set<(data: Passing[Name]) => void> } = {
  points: new Set(),
  workers: new Set(),
  events: new Set(),
};

/** Calls back for each message of a kind until the returned function is called. */
export function listen<Name extends keyof Passing>(name: Name, call: (data: Passing[Name]) => void): () => void {
  listeners[name].add(call);
  return () => {
    listeners[name].delete(call);
  };
}

/** Hands a message to the store and to the listeners. */
export function receive<Name extends LiveName>(name: Name, data: LiveEvents[Name]): void {
  useLive.setState((state) => withMessage(state, name, data), true);
  if (name === "points" || name === "workers" || name === "events") {
    const calls = listeners[name as keyof Passing] as Set<(data: unknown) => void>;
    for (const call of calls) call(data);
  }
}
