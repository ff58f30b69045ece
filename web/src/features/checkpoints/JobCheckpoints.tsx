import { getCheckpoints } from "@/shared/api/getCheckpoints";
import { useApi } from "@/shared/api/useApi";
import { bytes, count } from "@/shared/format/numbers";
import { moment } from "@/shared/format/times";
import { Empty, Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";

/** The checkpoints that the coordinator remembers, where their files cannot be read from here. */
export function JobCheckpoints({ job }: { job: string }) {
  const page = useApi(`job checkpoints ${job}`, (signal) => getCheckpoints(job, signal), { everyS: 5 });
  const items = (page.data?.items ?? []).slice().reverse();
  return (
    <Panel title="Committed checkpoints" detail={job} flush>
      {page.error !== undefined && <Failure error={page.error} onRetry={page.reload} />}
      {page.data === undefined && page.error === undefined && <Loading rows={4} />}
      {page.data !== undefined && items.length === 0 && (
        <Empty icon="checkpoints" title="No checkpoint yet">
          <p>A script saves one with</p>
          <code className="command">ctx.maybe_checkpoint({"{"}"model": model, "optimizer": optimizer{"}"})</code>
        </Empty>
      )}
      {items.length > 0 && (
        <div className="table-scroll">
          <table className="table">
            <thead>
              <tr>
                <th scope="col">Checkpoint</th>
                <th scope="col">Type</th>
                <th scope="col" className="right">Step</th>
                <th scope="col" className="right">Size</th>
                <th scope="col" className="right">Ranks</th>
                <th scope="col">Committed</th>
                <th scope="col">Path</th>
              </tr>
            </thead>
            <tbody>
              {items.map((item) => (
                <tr key={item.checkpoint_id}>
                  <td className="mono">{item.checkpoint_id}</td>
                  <td>{item.type.toLowerCase().replace("_", " ")}</td>
                  <td className="right num">{count(item.step)}</td>
                  <td className="right num">{bytes(item.size_bytes)}</td>
                  <td className="right num">
                    {item.num_acked} of {item.num_ranks}
                  </td>
                  <td className="num">{item.committed_at_s === null ? "being saved" : moment(item.committed_at_s)}</td>
                  <td className="mono">{item.path}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}
