import { Link } from "wouter";
import type { JobSummary } from "@/shared/api/types";
import { compact, count, duration, number, plural } from "@/shared/format/numbers";
import { useLive } from "@/shared/live/store";
import { Panel } from "@/shared/ui/Panel";
import { Progress } from "@/shared/ui/Progress";
import { JobBadge, LevelIcon, StatesBar } from "@/shared/ui/Status";
import { useQuery } from "@/shared/url/useQuery";

/** All jobs with their progress; choosing one changes what the page shows. */
export function JobsTable({ jobs, chosen }: { jobs: readonly JobSummary[]; chosen: string }) {
  const numJobs = useLive((state) => state.numJobs);
  const { href } = useQuery();
  const detail = numJobs > jobs.length ? `${count(jobs.length)} of ${count(numJobs)}` : plural(jobs.length, "job");
  return (
    <Panel title="Jobs" detail={detail} flush>
      <div className="table-scroll jobs-scroll">
        <table className="table">
          <thead>
            <tr>
              <th scope="col">Job</th>
              <th scope="col">State</th>
              <th scope="col">Epoch progress</th>
              <th scope="col" className="right">
                Step
              </th>
              <th scope="col" className="right">
                Steps/s
              </th>
              <th scope="col" className="right">
                Rows/s
              </th>
              <th scope="col">Workers</th>
              <th scope="col" className="right">
                Checkpoint age
              </th>
              <th scope="col">Health</th>
            </tr>
          </thead>
          <tbody>
            {jobs.map((job) => (
              <tr key={job.job_id} aria-current={job.job_id === chosen}>
                <td>
                  <Link href={href("/", { job: job.job_id })} className="strong">
                    {job.job_id}
                  </Link>
                </td>
                <td>
                  <JobBadge state={job.state} />
                </td>
                <td>
                  <Progress fraction={job.data_fraction} label={`Data of the epoch that ${job.job_id} has read`} />
                </td>
                <td className="right num">{count(job.step)}</td>
                <td className="right num">{number(job.steps_per_s, 3)}</td>
                <td className="right num">{compact(job.rows_per_s)}</td>
                <td>
                  <span className="workers-cell">
                    <span className="num">{count(job.num_workers)}</span>
                    <StatesBar counts={job.workers_by_state} />
                  </span>
                </td>
                <td className="right num">{duration(job.checkpoint_age_s)}</td>
                <td>
                  <span className="health-cell" title={job.health.line}>
                    <LevelIcon level={job.health.level} />
                    <span className="truncate">{job.health.line}</span>
                  </span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
