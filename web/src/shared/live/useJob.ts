import type { JobSummary } from "@/shared/api/types";
import { useQuery } from "@/shared/url/useQuery";
import { useLive } from "./store";

export interface ChosenJob {
  /** Empty if the coordinator has no job. */
  jobId: string;
  /** Undefined for a job that is not among the live ones. */
  job: JobSummary | undefined;
}

/** The job of the address; the first one if the address names none. */
export function useJob(): ChosenJob {
  const { get } = useQuery();
  const chosen = get("job");
  const job = useLive((state) => (chosen === "" ? state.jobs[0] : state.jobs.find((each) => each.job_id === chosen)));
  return { jobId: chosen === "" ? (job?.job_id ?? "") : chosen, job };
}
