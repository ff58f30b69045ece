import { useLive } from "@/shared/live/store";
import { useJob } from "@/shared/live/useJob";
import { Command, Empty } from "@/shared/ui/Notice";
import { Charts } from "./Charts";
import { EndedFigures } from "./EndedFigures";
import { Figures } from "./Figures";
import { JobsTable } from "./JobsTable";
import { RecentEvents } from "./RecentEvents";
import "./overview.css";

export function OverviewPage() {
  const jobs = useLive((state) => state.jobs);
  const ended = useLive((state) => state.ended);
  const { jobId, job } = useJob();

  if (jobs.length === 0 && jobId === "") {
    return (
      <div className="page">
        <h1>Overview</h1>
        <Figures job={undefined} />
        <Empty icon="overview" title="No jobs yet">
          <p>The coordinator is running and waits for workers. Start a run from your training script:</p>
          <Command>strata run --workers 2 train.py</Command>
          <p className="muted">Jobs, charts and events appear here as soon as the first worker registers.</p>
        </Empty>
      </div>
    );
  }
  return (
    <div className="page">
      <div className="page-head">
        <div>
          <h1>{jobId}</h1>
          <p className="lead">
            {job === undefined
              ? "This job is not running; its history is shown as far as it is kept."
              : `generation ${job.generation}${job.reason === "" ? "" : `: ${job.reason}`}`}
          </p>
        </div>
      </div>
      {ended === undefined ? <Figures job={job} /> : <EndedFigures ended={ended} job={job} />}
      {jobs.length > 1 && <JobsTable jobs={jobs} chosen={jobId} />}
      <Charts job={jobId} />
      <RecentEvents job={jobId} />
    </div>
  );
}
