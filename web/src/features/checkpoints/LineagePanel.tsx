import { getLineage } from "@/shared/api/getLineage";
import type { StoredCheckpoint } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { bytes, count, DASH, duration, plural } from "@/shared/format/numbers";
import { moment } from "@/shared/format/times";
import { MomentLink } from "@/shared/ui/MomentLink";
import { Failure } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { rows } from "./descent";

const EVERY_S = 10;

interface Props {
  job: string;
  /** The checkpoints whose manifests can be read. */
  stored: readonly StoredCheckpoint[];
}

/** Which attempt made each checkpoint, from which it was computed, and who resumed from it. */
export function LineagePanel({ job, stored }: Props) {
  const { data, error, reload } = useApi(`lineage ${job}`, (signal) => getLineage(job, signal), { everyS: EVERY_S });
  if (error !== undefined) return <Failure error={error} onRetry={reload} />;
  if (data === undefined || data.checkpoints.total === 0) return null;
  const { items, total } = data.checkpoints;
  const shown = items.length < total ? `newest ${count(items.length)} of ${count(total)}` : plural(total, "commit");
  const lines = rows(items, stored);
  const hasTimes = lines.some((each) => typeof each.stored?.duration_s === "number");
  const hasStalls = lines.some((each) => typeof each.stored?.stall_s === "number");
  const hasParents = lines.some((each) => (each.stored?.parent ?? "") !== "");
  return (
    <Panel
      title="Lineage"
      detail={data.is_recorded ? shown : `${shown}; attempts are recorded by the page of a run only`}
      flush
    >
      <div
        className="table-scroll lineage"
        role="group"
        aria-label="Commits, newest first"
        // A region that scrolls must be reachable from the keyboard.
        // eslint-disable-next-line jsx-a11y/no-noninteractive-tabindex
        tabIndex={0}
      >
        <table className="table">
          <thead>
            <tr>
              <th scope="col" className="right">Step</th>
              <th scope="col">Type</th>
              <th scope="col" className="right">Size</th>
              {hasTimes && <th scope="col" className="right">Save took</th>}
              {hasStalls && <th scope="col" className="right">Blocked</th>}
              <th scope="col">Committed</th>
              <th scope="col">Made by</th>
              <th scope="col">Resumed by</th>
              {hasParents && <th scope="col">Parent</th>}
              <th scope="col">Checkpoint</th>
            </tr>
          </thead>
          <tbody>
            {lines.map(({ line, stored: manifest }) => (
              <tr key={line.checkpoint_id}>
                <td className="right num">{count(line.step)}</td>
                <td>{line.type.toLowerCase().replace("_", " ")}</td>
                <td className="right num">{bytes(line.size_bytes)}</td>
                {hasTimes && <td className="right num">{duration(manifest?.duration_s)}</td>}
                {hasStalls && <td className="right num">{duration(manifest?.stall_s)}</td>}
                <td className="num">
                  <MomentLink atS={line.committed_at_s}>{moment(line.committed_at_s)}</MomentLink>
                </td>
                <td>{line.attempt === null ? DASH : `attempt ${count(line.attempt)}`}</td>
                <td>
                  {line.resumed_by.length === 0 && DASH}
                  {line.resumed_by.map(({ attempt, at_s }, index) => (
                    <span key={attempt}>
                      {index > 0 && ", "}
                      <MomentLink atS={at_s}>attempt {count(attempt)}</MomentLink>
                    </span>
                  ))}
                </td>
                {hasParents && (
                  <td className="mono">{manifest === undefined || manifest.parent === "" ? DASH : manifest.parent}</td>
                )}
                <td className="mono">{line.checkpoint_id}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
