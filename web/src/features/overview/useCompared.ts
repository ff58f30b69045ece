/** The series of other jobs, moved so that they begin together with those of the chosen one. */
import { getSeries } from "@/shared/api/getSeries";
import type { SeriesInfo } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { type Shown, useSeries } from "@/shared/chart/useSeries";

/** Together with the chosen job, as many as there are colours that everybody can tell apart. */
export const MAX_COMPARED = 3;
const EVERY_S = 15;

export interface Compared {
  job: string;
  /** Seconds by which its series are moved. */
  shiftS: number;
  shown: Shown;
}

interface Query {
  names: readonly string[];
  windowS: number;
  from?: number;
  to?: number;
}

/** Returns when the first value of a job was measured; undefined if none is kept. */
export function beganAtS(infos: readonly SeriesInfo[]): number | undefined {
  return infos.length === 0 ? undefined : Math.min(...infos.map((each) => each.first_at_s));
}

/** Returns the jobs that an address names, without the chosen one and without repetitions. */
export function comparedIn(text: string, job: string): string[] {
  const named = text.split(",").filter((each) => each !== "" && each !== job);
  return [...new Set(named)].slice(0, MAX_COMPARED);
}

export function useCompared(own: readonly SeriesInfo[], jobs: readonly string[], query: Query): Compared[] {
  const load = (signal: AbortSignal): Promise<SeriesInfo[]> =>
    Promise.all(jobs.map((job) => getSeries(job, signal))).then((pages) => pages.flatMap((page) => page.items));
  const infos = useApi(`began ${jobs.join(",")}`, load, { everyS: EVERY_S, enabled: jobs.length > 0 }).data ?? [];
  const began = beganAtS(own);
  const shiftOf = (job: string | undefined): number | undefined => {
    const other = beganAtS(infos.filter((each) => each.job_id === job));
    return began === undefined || other === undefined ? undefined : Math.round(began - other);
  };
  const queryOf = (job: string | undefined): Parameters<typeof useSeries>[0] => {
    const shiftS = shiftOf(job);
    return { ...query, job: job ?? "", names: shiftS === undefined ? [] : query.names, shiftS: shiftS ?? 0 };
  };
  const shown = [useSeries(queryOf(jobs[0])), useSeries(queryOf(jobs[1])), useSeries(queryOf(jobs[2]))];
  return jobs.flatMap((job, index) => {
    const found = shown[index];
    return found === undefined ? [] : [{ job, shiftS: shiftOf(job) ?? 0, shown: found }];
  });
}
