import { Link } from "wouter";
import type { JobSummary, RunEnd } from "@/shared/api/types";
import { count, DASH, duration, percent, plural } from "@/shared/format/numbers";
import { moment } from "@/shared/format/times";
import { Tile } from "@/shared/ui/Tile";
import { useQuery } from "@/shared/url/useQuery";

/** The figures of a run that is over. */
export function EndedFigures({ ended, job }: { ended: RunEnd; job: JobSummary | undefined }) {
  const { href } = useQuery();
  const fraction = job?.data_fraction ?? null;
  return (
    <dl className="tiles" aria-label="Figures">
      <Tile label="End" value={ended.state} detail={ended.reason === "" ? moment(ended.ended_at_s) : ended.reason} />
      <Tile label="Duration" value={duration(ended.ended_at_s - ended.began_at_s)} detail={`from ${moment(ended.began_at_s)}`} />
      <Tile
        label="Last step"
        value={count(ended.step)}
        detail={fraction === null ? undefined : `${percent(fraction)} of data`}
      />
      <Tile
        label="Restarts"
        value={count(ended.num_restarts)}
        detail={<Link href={href("/recovery")}>{plural(ended.num_restarts, "recovery", "recoveries")}</Link>}
      />
      <Tile
        label="Last checkpoint"
        value={job?.checkpoint_step === null || job === undefined ? DASH : `step ${count(job.checkpoint_step)}`}
        detail={
          job?.checkpoint_step === null || job === undefined ? (
            "none committed"
          ) : (
            <Link href={href("/checkpoints")}>open it</Link>
          )
        }
      />
    </dl>
  );
}
