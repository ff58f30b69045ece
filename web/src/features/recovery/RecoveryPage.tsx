import { getRecoveries } from "@/shared/api/getRecoveries";
import type { RecoveryMoment, RunRecovery } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { count, duration, plural } from "@/shared/format/numbers";
import { clock, moment } from "@/shared/format/times";
import { useJob } from "@/shared/live/useJob";
import { Empty, Failure, Loading } from "@/shared/ui/Notice";
import { MomentLink } from "@/shared/ui/MomentLink";
import { Panel } from "@/shared/ui/Panel";
import { inOrder } from "./moments";
import "./recovery.css";

const REFRESH_S = 2;
const LABELS: Record<RecoveryMoment["name"], string> = {
  detected: "Failure detected",
  generation: "New generation",
  started: "Workers started",
  chosen: "Checkpoint chosen",
  loaded: "Checkpoint loaded",
  first_step: "First step",
};

/** Every failure of a run, from its detection to the first step after it. */
export default function RecoveryPage() {
  const { jobId } = useJob();
  const { data, error, reload } = useApi(`recoveries ${jobId}`, (signal) => getRecoveries(jobId, signal), {
    everyS: REFRESH_S,
    enabled: jobId !== "",
  });
  return (
    <div className="page">
      <div className="page-head">
        <div>
          <h1>Recovery</h1>
          <p className="lead">
            {data === undefined ? "Failures of a run and how it went on." : plural(data.num_recoveries, "failure")}
          </p>
        </div>
      </div>
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {jobId !== "" && data === undefined && error === undefined && <Loading rows={4} label="Loading the failures" />}
      {(jobId === "" || (data !== undefined && data.items.length === 0)) && (
        <Empty icon="ok" title={data?.is_recorded === false ? "No timeline of this job" : "No failures"}>
          {data?.is_recorded === false ? (
            <p>Only the dashboard of strata run has the timeline of its run. The page Events shows the journal.</p>
          ) : (
            <p>A worker that exits, is killed or hangs appears here with its cause.</p>
          )}
        </Empty>
      )}
      {data?.items.map((each) => <OneRecovery key={`${each.failed_attempt} ${each.moments[0]?.at_s}`} found={each} />)}
    </div>
  );
}

function OneRecovery({ found }: { found: RunRecovery }) {
  const moments = inOrder(found.moments);
  const detected = moments[0]?.at_s;
  const missing = found.moments.filter((each) => each.at_s === null);
  return (
    <Panel
      title={found.cause}
      detail={[
        `attempt ${found.failed_attempt}`,
        detected === undefined ? "" : moment(detected),
        found.took_s === null ? "no step since" : `first step after ${duration(found.took_s)}`,
      ]
        .filter((each) => each !== "")
        .join(" · ")}
    >
      <ol className="recovery-moments">
        {moments.map(({ name, at_s, after_s, since_s }) => (
          <li key={name} className="recovery-moment">
            <span className="strong">{LABELS[name]}</span>
            <span className="num">
              <MomentLink atS={at_s}>{after_s === 0 ? clock(at_s) : `+${duration(after_s)}`}</MomentLink>
            </span>
            <span className="muted">{what(found, name)}</span>
            {since_s > 0 && <span className="muted">took {duration(since_s)}</span>}
          </li>
        ))}
      </ol>
      {missing.length > 0 && (
        <p className="muted">Not seen: {missing.map((each) => LABELS[each.name].toLowerCase()).join(", ")}.</p>
      )}
      {found.last_lines.length > 0 && (
        <details className="recovery-log">
          <summary>Last lines of rank {found.rank}</summary>
          <pre>{found.last_lines.join("\n")}</pre>
        </details>
      )}
    </Panel>
  );
}

function what(found: RunRecovery, name: RecoveryMoment["name"]): string {
  if (name === "generation" && found.generation !== null) return `generation ${count(found.generation)}`;
  if (name === "started" && found.attempt !== null) return `attempt ${count(found.attempt)}`;
  if (name === "loaded" && found.step !== null) return `step ${count(found.step)}`;
  if (name === "first_step" && found.first_step !== null) return `step ${count(found.first_step)}`;
  return "";
}
