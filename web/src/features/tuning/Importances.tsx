import { getImportances } from "@/shared/api/getImportances";
import type { StudyInfo } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { percent, plural } from "@/shared/format/numbers";
import { Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { numIn } from "./views";

/** Finished trials after which importances are computed anew: they change slowly and take long. */
const BATCH = 10;

interface Props {
  found: StudyInfo;
  metric: string;
}

/** How much each parameter matters for the objective. */
export function Importances({ found, metric }: Props) {
  const objective = found.metrics.includes(metric) ? metric : (found.metrics[0] ?? "");
  const finished = numIn(found.counts, "finished");
  const batch = found.is_running && finished > BATCH ? Math.floor(finished / BATCH) * BATCH : finished;
  const { data, error, reload } = useApi(
    `importances ${found.study} ${objective} ${batch}`,
    (signal) => getImportances(found.study, objective, signal),
    { keep: true },
  );
  return (
    <Panel
      title="Importance of parameters"
      detail={data === undefined || data.problem !== "" ? undefined : `for ${objective}, from ${plural(data.num_trials, "finished trial")}`}
    >
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {data === undefined && error === undefined && <Loading label="Computing the importances" />}
      {data !== undefined && data.problem !== "" && <p className="muted">{data.problem}.</p>}
      {data !== undefined && data.items.length > 0 && (
        <ol className="tuning-bars">
          {data.items.map((each) => (
            <li key={each.name}>
              <span className="truncate" title={each.name}>
                {each.name}
              </span>
              <span className="tuning-bar" aria-hidden="true">
                <span style={{ width: `${each.importance * 100}%` }} />
              </span>
              <span className="num">{percent(each.importance)}</span>
            </li>
          ))}
        </ol>
      )}
    </Panel>
  );
}
