import { Link } from "wouter";
import type { JobSummary } from "@/shared/api/types";
import { compact, count, DASH, duration, number, percent, plural } from "@/shared/format/numbers";
import { useLive } from "@/shared/live/store";
import { JobBadge, StatesBar } from "@/shared/ui/Status";
import { Tile } from "@/shared/ui/Tile";
import { useQuery } from "@/shared/url/useQuery";

/** The figures of the chosen job, and those of the coordinator. */
export function Figures({ job }: { job: JobSummary | undefined }) {
  const figures = useLive((state) => state.figures);
  const { href } = useQuery();
  return (
    <dl className="tiles" aria-label="Figures">
      {job !== undefined && (
        <>
          <Tile
            label="Step"
            value={count(job.step)}
            detail={
              <span className="tile-line">
                <JobBadge state={job.state} />
                {job.epoch !== null && <span>epoch {job.epoch}</span>}
                {job.data_fraction !== null && <span>{percent(job.data_fraction)} of data</span>}
              </span>
            }
          />
          <Tile label="Step rate" value={number(job.steps_per_s, 3)} unit="steps/s" detail="mean over ranks" />
          <Tile label="Row rate" value={compact(job.rows_per_s)} unit="rows/s" detail="sum over ranks" />
          <Tile
            label="Workers"
            value={count(job.num_workers)}
            detail={
              <>
                <StatesBar counts={job.workers_by_state} legend />
                {job.num_suspects > 0 && (
                  <Link href={href("/workers", { suspect: "true" })} className="suspects">
                    {plural(job.num_suspects, "lost connection")}
                  </Link>
                )}
              </>
            }
          />
          <Tile
            label="Last checkpoint"
            value={duration(job.checkpoint_age_s)}
            {...(job.checkpoint_age_s === null ? {} : { unit: "ago" })}
            detail={
              job.checkpoint_step === null ? (
                "none committed"
              ) : (
                <Link href={href("/checkpoints")}>at step {count(job.checkpoint_step)}</Link>
              )
            }
          />
        </>
      )}
      <Tile
        label="Barriers"
        value={figures?.barrier_p50_s === null ? DASH : duration(figures?.barrier_p50_s)}
        unit="p50"
        detail={figures?.barrier_p99_s === null ? "none in the last minute" : `p99 ${duration(figures?.barrier_p99_s)}`}
      />
      <Tile
        label="Coordinator"
        value={number(figures?.requests_per_s, 3)}
        unit="requests/s"
        detail={`${plural(figures?.num_sessions ?? 0, "session")}, ${plural(figures?.num_jobs ?? 0, "job")}`}
      />
    </dl>
  );
}
