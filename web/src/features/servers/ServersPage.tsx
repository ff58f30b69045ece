import { useMemo } from "react";
import { getServers } from "@/shared/api/getServers";
import type { JobServers } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { TimeChart } from "@/shared/chart/TimeChart";
import { useSeries } from "@/shared/chart/useSeries";
import { bytes, count, duration, number, percent, plural } from "@/shared/format/numbers";
import { useLive } from "@/shared/live/store";
import { useJob } from "@/shared/live/useJob";
import { Command, Empty, Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { Tile } from "@/shared/ui/Tile";
import { CHARTS, lookups } from "./figures";
import "./servers.css";

const REFRESH_S = 2;
const WINDOW_S = 300;

/** The parameter servers of a job: rows, memory, traffic, staleness and hit rates, as the servers report them. */
export default function ServersPage() {
  const { jobId } = useJob();
  const { data, error, reload } = useApi(`servers ${jobId}`, (signal) => getServers(jobId, signal), {
    everyS: REFRESH_S,
    enabled: jobId !== "",
  });
  return (
    <div className="page">
      <div className="page-head">
        <div>
          <h1>Parameter servers</h1>
          <p className="lead">Tables and traffic of the servers{jobId === "" ? "" : ` of ${jobId}`}, as they report them.</p>
        </div>
      </div>
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {jobId !== "" && data === undefined && error === undefined && <Loading rows={5} label="Loading the servers" />}
      {(jobId === "" || (data !== undefined && data.servers.total === 0)) && (
        <Empty icon="folder" title="No parameter servers">
          <p>A Trainer keeps large embedding tables on servers with the strategy</p>
          <Command>strategy=Hybrid(sparse=ParameterServer(servers=2))</Command>
        </Empty>
      )}
      {data !== undefined && data.servers.total > 0 && <Servers data={data} />}
    </div>
  );
}

function Servers({ data }: { data: JobServers }) {
  const { total, servers } = data;
  const rest = servers.total - servers.items.length;
  return (
    <>
      <dl className="tiles" aria-label="All servers">
        <Tile label="Servers" value={count(servers.total)} />
        <Tile label="Rows" value={count(total?.rows)} detail={`${count(total?.evicted)} evicted`} />
        <Tile label="Memory" value={bytes(total?.bytes)} detail="of the tables" />
        <Tile label="Pulls" value={number(total?.pulls_per_s, 4)} unit="1/s" detail="over the last 10 s" />
        <Tile label="Pushes" value={number(total?.pushes_per_s, 4)} unit="1/s" detail="over the last 10 s" />
        <Tile label="Staleness" value={count(total?.staleness)} unit="steps" detail="fastest to slowest worker" />
        <Tile label="Hit rate" value={percent(total?.hit_rate)} detail={lookups(total?.hit_rate)} />
      </dl>
      <Panel title="Servers" detail={rest > 0 ? `and ${count(rest)} more` : plural(servers.total, "server")} flush>
        <div className="table-scroll">
          <table className="table">
            <thead>
              <tr>
                {["Server", "Step", "Rows", "Memory", "Pulls/s", "Pushes/s", "Stale", "Hits", "Evicted", "Heartbeat"].map(
                  (heading) => (
                    <th key={heading} scope="col" className="right">
                      {heading}
                    </th>
                  ),
                )}
                <th scope="col">Worker</th>
              </tr>
            </thead>
            <tbody>
              {servers.items.map((each) => (
                <tr key={each.worker_id}>
                  <td className="right num">{each.number}</td>
                  <td className="right num">{count(each.step)}</td>
                  <td className="right num">{count(each.rows)}</td>
                  <td className="right num">{bytes(each.bytes)}</td>
                  <td className="right num">{number(each.pulls_per_s, 4)}</td>
                  <td className="right num">{number(each.pushes_per_s, 4)}</td>
                  <td className="right num">{count(each.staleness)}</td>
                  <td className="right num">{percent(each.hit_rate)}</td>
                  <td className="right num">{count(each.evicted)}</td>
                  <td className="right num">{each.suspect ? "lost connection" : `${duration(each.silent_s)} ago`}</td>
                  <td className="mono">{each.worker_id}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </Panel>
      <Charts job={data.job_id} />
    </>
  );
}

/** The totals over the last five minutes. */
function Charts({ job }: { job: string }) {
  const names = useMemo(() => CHARTS.map((chart) => chart.name), []);
  const shown = useSeries({ job, names, windowS: WINDOW_S });
  const atS = useLive((state) => state.atS);
  const drawn = CHARTS.filter(({ name }) => (shown.series.get(name)?.t.length ?? 0) > 0);
  if (shown.error !== undefined) return <Failure error={shown.error} />;
  return (
    <div className="server-charts">
      {drawn.map(({ name, title }) => (
        <Panel key={name} title={title} detail="all servers, five minutes">
          <TimeChart
            label={`${title} of all servers over time`}
            series={[shown.series.get(name)].flatMap((each) => each ?? [])}
            names={[name]}
            version={shown.version}
            range={{ from: atS - WINDOW_S, to: atS }}
            isLog={false}
            smoothing={0}
            syncKey="servers"
            onZoom={() => undefined}
          />
        </Panel>
      ))}
    </div>
  );
}
