import { getTrial } from "@/shared/api/getTrial";
import type { StudyInfo } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { count, duration, number, plural } from "@/shared/format/numbers";
import { moment } from "@/shared/format/times";
import { Button } from "@/shared/ui/Button";
import { Command, Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { useQuery } from "@/shared/url/useQuery";
import { TrialCommands } from "./TrialCommands";
import { valueWords } from "./views";

/** One trial: its configuration, last values, reason and checkpoint. */
export function TrialDetails({ found, trial }: { found: StudyInfo; trial: number }) {
  const { set } = useQuery();
  const { data, error, reload } = useApi(
    `trial ${found.study} ${trial} ${found.version}`,
    (signal) => getTrial(found.study, trial, signal),
    { keep: true },
  );
  return (
    <Panel
      title={`Trial ${trial}`}
      detail={data?.state}
      actions={
        <>
          {found.may_command && data !== undefined && data !== null && (
            <TrialCommands key={trial} study={found.study} trial={data} />
          )}
          <Button
            look="quiet"
            icon="close"
            aria-label="Close the trial"
            onClick={() => {
              set({ trial: null });
            }}
          />
        </>
      }
    >
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {data === undefined && error === undefined && <Loading label="Loading the trial" />}
      {data === null && <p className="muted">The study has no trial of this number yet.</p>}
      {data !== undefined && data !== null && (
        <div className="tuning-details">
          {data.reason !== "" && <pre className="tuning-words">{data.reason}</pre>}
          <dl>
            {Object.entries(data.values).map(([name, value]) => (
              <Entry key={`value ${name}`} name={name} value={number(value, 6)} />
            ))}
            {Object.entries(data.config).map(([name, value]) => (
              <Entry key={`config ${name}`} name={name} value={valueWords(value)} />
            ))}
          </dl>
          <dl>
            <Entry name="step" value={count(data.step)} />
            <Entry name="starts" value={count(data.num_starts)} />
            <Entry name="began" value={data.started_at_s === null ? "–" : moment(data.started_at_s)} />
            <Entry name="time" value={duration(data.duration_s)} />
            {data.num_slots > 0 && <Entry name="runs on" value={plural(data.num_slots, "slot")} />}
            {data.donors.length > 0 && <Entry name="continued from trials" value={data.donors.join(", ")} />}
          </dl>
          {data.checkpoint !== "" && (
            <div>
              <p className="muted">Checkpoint of step {count(data.checkpoint_step)}</p>
              <Command>{`strata dashboard ${data.checkpoint}`}</Command>
            </div>
          )}
        </div>
      )}
    </Panel>
  );
}

function Entry({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt className="truncate" title={name}>
        {name}
      </dt>
      <dd className="num">{value}</dd>
    </div>
  );
}
