import { getGoodput } from "@/shared/api/getGoodput";
import type { GoodputEntry } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { duration, percent, plural } from "@/shared/format/numbers";
import { useLive } from "@/shared/live/store";
import { useJob } from "@/shared/live/useJob";
import { Command, Empty, Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { CATEGORIES, share } from "./categories";
import "./goodput.css";

const REFRESH_S = 2;
/** Newest attempts that have a bar and a column. */
const MAX_SHOWN = 8;

/** Where the wall time of a run went, as parts that add up to all of it. */
export default function GoodputPage() {
  const { jobId } = useJob();
  const isOver = useLive((state) => state.ended !== undefined);
  const { data, error, reload } = useApi(`goodput ${jobId}`, (signal) => getGoodput(jobId, signal), {
    everyS: REFRESH_S,
    enabled: jobId !== "",
  });
  return (
    <div className="page">
      <div className="page-head">
        <div>
          <h1>Goodput</h1>
          <p className="lead">Where the wall time of all ranks went. The parts add up to 100 %.</p>
        </div>
      </div>
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {jobId !== "" && data === undefined && error === undefined && <Loading rows={4} label="Loading the ledger" />}
      {isOver && data?.run === null && (
        <Empty icon="overview" title="Not recorded">
          <p>The processes of a run are recorded in its history, and this run has kept none.</p>
        </Empty>
      )}
      {!isOver && (jobId === "" || (data !== undefined && data.run === null)) && (
        <Empty icon="overview" title="Nothing measured yet">
          <p>The ledger begins when the first worker of a run joins. Start one:</p>
          <Command>strata run --workers 2 train.py</Command>
        </Empty>
      )}
      {data?.run && <Ledger run={data.run} attempts={data.attempts.slice(-MAX_SHOWN)} numAttempts={data.num_attempts} />}
    </div>
  );
}

interface LedgerProps {
  run: GoodputEntry;
  attempts: readonly GoodputEntry[];
  numAttempts: number;
}

function Ledger({ run, attempts, numAttempts }: LedgerProps) {
  const shown = attempts.length < numAttempts ? `newest ${attempts.length} of ${numAttempts}` : plural(numAttempts, "attempt");
  return (
    <>
      <Panel title={`${percent(run.goodput)} goodput`} detail={`${duration(run.total_s)} of all ranks · ${shown}`}>
        <div className="goodput-bars">
          <Bar label="Run" entry={run} />
          {numAttempts > 1 &&
            attempts.map((each) => <Bar key={each.attempt} label={`Attempt ${each.attempt}`} entry={each} />)}
        </div>
      </Panel>
      <Panel title="Parts" flush>
        <div className="table-scroll">
          <table className="table">
            <thead>
              <tr>
                <th scope="col">Part</th>
                <th scope="col" className="right">
                  Share
                </th>
                <th scope="col" className="right">
                  Time
                </th>
                {attempts.map((each) => (
                  <th key={each.attempt} scope="col" className="right">
                    Attempt {each.attempt}
                  </th>
                ))}
                <th scope="col">Measured</th>
              </tr>
            </thead>
            <tbody>
              {CATEGORIES.map(({ name, label, meaning }) => (
                <tr key={name}>
                  <td>
                    <span className={`goodput-key part-${name}`} aria-hidden="true" /> {label}
                  </td>
                  <td className="right num">{percent(share(run, name))}</td>
                  <td className="right num">{duration(run.parts_s[name])}</td>
                  {attempts.map((each) => (
                    <td key={each.attempt} className="right num">
                      {duration(each.parts_s[name])}
                    </td>
                  ))}
                  <td className="muted">{meaning}</td>
                </tr>
              ))}
              <tr>
                <td className="strong">Total</td>
                <td className="right num">{run.total_s > 0 ? "100 %" : percent(null)}</td>
                <td className="right num">{duration(run.total_s)}</td>
                {attempts.map((each) => (
                  <td key={each.attempt} className="right num">
                    {duration(each.total_s)}
                  </td>
                ))}
                <td className="muted">wall time multiplied by ranks</td>
              </tr>
            </tbody>
          </table>
        </div>
      </Panel>
    </>
  );
}

function Bar({ label, entry }: { label: string; entry: GoodputEntry }) {
  const parts = CATEGORIES.filter(({ name }) => share(entry, name) > 0);
  const words = parts.map((each) => `${each.label} ${percent(share(entry, each.name))}`).join(", ");
  return (
    <div className="goodput-row">
      <span className="goodput-label">{label}</span>
      <div className="goodput-bar" role="img" aria-label={`${label}: ${words}`}>
        {parts.map(({ name, label: part }) => (
          <span
            key={name}
            className={`goodput-part part-${name}`}
            style={{ flexGrow: share(entry, name) }}
            title={`${part}: ${percent(share(entry, name))}, ${duration(entry.parts_s[name])}`}
          />
        ))}
      </div>
      <span className="num goodput-value">{percent(entry.goodput)}</span>
    </div>
  );
}
