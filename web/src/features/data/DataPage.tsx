import { getData, OWNERS } from "@/shared/api/getData";
import type { JobData, JobShards } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { count, number, percent, plural } from "@/shared/format/numbers";
import { moment } from "@/shared/format/times";
import { useJob } from "@/shared/live/useJob";
import { Button } from "@/shared/ui/Button";
import { Select } from "@/shared/ui/Choice";
import { Command, Empty, Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { Progress } from "@/shared/ui/Progress";
import { Tile } from "@/shared/ui/Tile";
import { useQuery } from "@/shared/url/useQuery";
import { ShardStrip } from "./ShardStrip";
import { balance } from "./shards";
import "./data.css";

const REFRESH_S = 2;

/** Datasets, the shards of each worker, what the last change moved, and the ranks that wait for data. */
export default function DataPage() {
  const { jobId } = useJob();
  const { get, set } = useQuery();
  const dataset = get("dataset");
  const offset = /^\d{1,9}$/.test(get("owner")) ? Number(get("owner")) : 0;
  const loaded = useApi(
    `data ${jobId} ${dataset} ${offset}`,
    (signal) => getData(jobId, dataset, offset, signal),
    { everyS: REFRESH_S, enabled: jobId !== "", keep: true },
  );
  const { error, reload } = loaded;
  // Another page of owners may be shown until the next arrives, another job may not.
  const data = loaded.data?.job_id === jobId ? loaded.data : undefined;
  return (
    <div className="page">
      <div className="page-head">
        <div>
          <h1>Data</h1>
          <p className="lead">Which worker reads which shards of the epoch, and who waits for data.</p>
        </div>
        {data !== undefined && data.datasets.length > 1 && (
          <Select
            label="Dataset"
            value={data.shards?.dataset.dataset_id ?? ""}
            options={data.datasets.map((each) => ({
              value: each.dataset_id,
              label: `${each.dataset_id} (${percent(each.num_done / Math.max(each.num_shards, 1))})`,
            }))}
            onChange={(chosen) => {
              set({ dataset: chosen, owner: null }, { push: true });
            }}
          />
        )}
      </div>
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {jobId === "" && (
        <Empty icon="tensor" title="No job yet">
          <p>Waits for data appear with the first steps of a run:</p>
          <Command>strata run --workers 2 train.py</Command>
        </Empty>
      )}
      {jobId !== "" && data === undefined && error === undefined && <Loading rows={6} label="Loading the data" />}
      {jobId !== "" && data !== undefined && (
        <>
          <Waits data={data} />
          {data.shards === null ? (
            <div className="panel">
              <Empty icon="tensor" title="This job has no registered dataset">
                <p>
                  <code>ctx.dataloader</code> computes which rank reads which rows, so the coordinator has no shards to
                  assign. To have shards assigned and tracked, register a dataset:
                </p>
                <Command>orchestrator.register_dataset(&quot;images&quot;, …)</Command>
              </Empty>
            </div>
          ) : (
            <Shards
              shards={data.shards}
              onPage={(next) => {
                set({ owner: next === 0 ? null : next.toString() });
              }}
            />
          )}
        </>
      )}
    </div>
  );
}

function Waits({ data }: { data: JobData }) {
  const measured = `${count(data.num_measured)} of ${plural(data.num_ranks, "rank")} measured, last 30 s`;
  return (
    <Panel title="Waiting for data" detail={measured} flush={data.waits.length > 0}>
      {data.waits.length === 0 && (
        <p className="muted">
          {data.num_measured === 0
            ? "Not measured yet: ranks report their waits from the second step on, for loaders of ctx.dataloader."
            : "No rank waits: each spent less than 10 % of the time inside next() of its loader."}
        </p>
      )}
      {data.waits.length > 0 && (
        <div className="table-scroll">
          <table className="table">
            <thead>
              <tr>
                <th scope="col" className="right">
                  Rank
                </th>
                <th scope="col">Worker</th>
                <th scope="col">Waits</th>
                <th scope="col">Reason</th>
                <th scope="col">What to do</th>
              </tr>
            </thead>
            <tbody>
              {data.waits.map((wait) => (
                <tr key={wait.worker_id}>
                  <td className="right num">{wait.rank}</td>
                  <td className="mono">{wait.worker_id}</td>
                  <td>
                    <Progress fraction={wait.share} label={`Share of time that rank ${wait.rank} waits`} />
                  </td>
                  <td className="data-wait">{wait.reason}</td>
                  <td className="data-wait">{wait.cure}</td>
                </tr>
              ))}
            </tbody>
          </table>
          {data.num_waits > data.waits.length && (
            <p className="muted">and {count(data.num_waits - data.waits.length)} more</p>
          )}
        </div>
      )}
    </Panel>
  );
}

function Shards({ shards, onPage }: { shards: JobShards; onPage: (offset: number) => void }) {
  const { dataset, owners, last_move: move } = shards;
  const mostCells = Math.max(...owners.items.map((each) => each.cells.length), 1);
  const isPaged = owners.total > owners.items.length;
  return (
    <>
      <dl className="tiles" aria-label="Progress">
        <Tile
          label="Epoch"
          value={count(dataset.epoch)}
          detail={<Progress fraction={dataset.num_done / Math.max(dataset.num_shards, 1)} label="Progress of the epoch" />}
        />
        <Tile
          label="Shards done"
          value={count(dataset.num_done)}
          unit={`of ${count(dataset.num_shards)}`}
          detail={`${plural(dataset.total_samples, "sample")}${dataset.shuffle ? ", shuffled" : ""}`}
        />
        <Tile
          label="Shards per worker"
          value={shards.min_per_worker === null ? "–" : `${count(shards.min_per_worker)}–${count(shards.max_per_worker)}`}
          detail={`mean ${number(shards.mean_per_worker, 3)}, ${balance(shards.min_per_worker, shards.mean_per_worker, shards.max_per_worker)}`}
        />
        <Tile
          label="Left per worker"
          value={shards.min_left === null ? "–" : `${count(shards.min_left)}–${count(shards.max_left)}`}
          detail="fewest and most, in this epoch"
        />
        <Tile label="Without an owner" value={count(shards.num_waiting)} detail="shards that wait for a worker" />
      </dl>
      <Panel title="Last move of shards">
        {move === null ? (
          <p className="muted">The newest 20,000 entries of the journal have no move of this dataset.</p>
        ) : (
          <p>
            {plural(move.num_moved, "shard")} of {count(dataset.num_shards)} got a new owner at {moment(move.at_s)}, in
            generation {move.generation} with {plural(move.num_workers, "worker")}
            {move.reason === "" ? "." : <>: {move.reason}</>}
          </p>
        )}
      </Panel>
      <Panel
        title={`Shards of ${dataset.dataset_id} by owner`}
        detail={`in the order of reading; a cell is ${plural(shards.shards_per_cell, "shard")}, filled when done`}
      >
        <div className="shard-rows">
          {owners.items.map((owner) => (
            <div className="shard-row" key={owner.worker_id ?? ""}>
              <span className="truncate" title={owner.worker_id ?? undefined}>
                {owner.worker_id === null ? (
                  "without an owner"
                ) : (
                  <>
                    <span className="num">rank {owner.rank}</span> <span className="mono muted">{owner.worker_id}</span>
                  </>
                )}
              </span>
              <div className="shard-strip">
                <ShardStrip owner={owner} perCell={shards.shards_per_cell} mostCells={mostCells} />
              </div>
              <span className="num shard-figures">
                {count(owner.num_done)} of {count(owner.num_shards)}
                {owner.num_gained !== null && owner.num_gained > 0 && (
                  <span className="muted"> · +{count(owner.num_gained)} moved</span>
                )}
              </span>
            </div>
          ))}
        </div>
        {isPaged && (
          <div className="shard-pages">
            <Button
              disabled={owners.offset === 0}
              onClick={() => {
                onPage(Math.max(owners.offset - OWNERS, 0));
              }}
            >
              Previous
            </Button>
            <span className="muted num">
              {count(owners.offset + 1)}–{count(owners.offset + owners.items.length)} of {count(owners.total)}
            </span>
            <Button
              disabled={owners.next_offset === null}
              onClick={() => {
                onPage(owners.next_offset ?? 0);
              }}
            >
              Next
            </Button>
          </div>
        )}
      </Panel>
    </>
  );
}
