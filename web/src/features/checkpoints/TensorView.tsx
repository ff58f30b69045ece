import { useMemo, useState } from "react";
import { getHeatMap } from "@/shared/api/getHeatMap";
import { getHistogram } from "@/shared/api/getHistogram";
import { getRows } from "@/shared/api/getRows";
import { getSingularValues } from "@/shared/api/getSingularValues";
import { getStatistics } from "@/shared/api/getStatistics";
import type { TensorRef } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { LinePlot } from "@/shared/chart/LinePlot";
import { bytes, count, number, plural } from "@/shared/format/numbers";
import { Button } from "@/shared/ui/Button";
import { Choice } from "@/shared/ui/Choice";
import { Failure, Loading } from "@/shared/ui/Notice";
import { useQuery } from "@/shared/url/useQuery";
import { Follow } from "./Follow";
import { HeatMap } from "./HeatMap";
import { Histogram } from "./Histogram";
import { shapeWords } from "./Tree";

const VIEWS = [
  { value: "distribution", label: "Distribution" },
  { value: "rows", label: "Rows" },
  { value: "spectrum", label: "Singular values" },
  { value: "follow", label: "Over checkpoints" },
] as const;
type View = (typeof VIEWS)[number]["value"];

/** One tensor of one checkpoint. */
export function TensorView({ tensor }: { tensor: TensorRef }) {
  const { get, set } = useQuery();
  const view: View = VIEWS.find((each) => each.value === get("view"))?.value ?? "distribution";
  const loaded = useApi(`statistics ${Object.values(tensor).join(" ")}`, (signal) => getStatistics(tensor, signal));
  const statistics = loaded.data?.statistics;
  const facts: [string, string, boolean?][] =
    statistics === null || statistics === undefined
      ? []
      : [
          ["min", number(statistics.min)],
          ["max", number(statistics.max)],
          ["mean", number(statistics.mean)],
          ["std", number(statistics.std)],
          ["norm", number(statistics.norm)],
          ["NaN", count(statistics.num_nan), statistics.num_nan > 0],
          ["Inf", count(statistics.num_inf), statistics.num_inf > 0],
        ];
  return (
    <div className="tensor">
      <header>
        <h2 className="mono">{tensor.name}</h2>
        {loaded.data !== undefined && (
          <p className="muted num">
            {loaded.data.dtype} · {shapeWords(loaded.data.shape)} · {plural(loaded.data.num_elements, "element")} ·{" "}
            {bytes(loaded.data.num_bytes)}
          </p>
        )}
      </header>
      {loaded.error !== undefined && <Failure error={loaded.error} onRetry={loaded.reload} />}
      {loaded.data === undefined && loaded.error === undefined && <Loading rows={2} label="Reading the statistics" />}
      {facts.length > 0 && (
        <dl className="statistics">
          {facts.map(([name, value, isBad]) => (
            <div key={name} className={isBad === true ? "bad" : ""}>
              <dt>{name}</dt>
              <dd className="num">{value}</dd>
            </div>
          ))}
        </dl>
      )}
      <Choice
        label="View"
        value={view}
        options={VIEWS}
        onChange={(value) => {
          set({ view: value === "distribution" ? null : value });
        }}
      />
      {view === "distribution" && <Distribution tensor={tensor} />}
      {view === "rows" && <Rows tensor={tensor} />}
      {view === "spectrum" && <Spectrum tensor={tensor} />}
      {view === "follow" && <Follow tensor={tensor} />}
    </div>
  );
}

function Distribution({ tensor }: { tensor: TensorRef }) {
  const key = Object.values(tensor).join(" ");
  const { get, set } = useQuery();
  const isLog = get("hlog") === "true";
  const histogram = useApi(`histogram ${key}`, (signal) => getHistogram(tensor, signal));
  const map = useApi(`heatmap ${key}`, (signal) => getHeatMap(tensor, signal));
  const bars = useMemo(
    () => [{ label: "elements", colour: "--series-1" as const, counts: histogram.data?.counts ?? [] }],
    [histogram.data],
  );
  return (
    <>
      <div className="plot-head">
        <h3>Histogram</h3>
        <Button
          look="quiet"
          aria-pressed={isLog}
          onClick={() => {
            set({ hlog: isLog ? null : "true" });
          }}
        >
          log counts
        </Button>
      </div>
      {histogram.error !== undefined && <Failure error={histogram.error} onRetry={histogram.reload} />}
      {histogram.data === undefined && histogram.error === undefined && <Loading rows={4} label="Reading the tensor" />}
      {histogram.data !== undefined && histogram.data.counts.length === 0 && (
        <p className="muted">No element is finite, so there is no distribution to show.</p>
      )}
      {histogram.data !== undefined && histogram.data.counts.length > 0 && (
        <Histogram label={`Distribution of ${tensor.name}`} edges={histogram.data.edges} {...{ bars, isLog }} />
      )}
      <div className="plot-head">
        <h3>Heat map</h3>
        {map.data !== undefined && (
          <span className="muted num">
            {count(map.data.num_rows)} × {count(map.data.num_columns)}, means of blocks
          </span>
        )}
      </div>
      {map.error !== undefined && <Failure error={map.error} onRetry={map.reload} />}
      {map.data === undefined && map.error === undefined && <Loading rows={4} label="Reading the tensor" />}
      {map.data !== undefined && <HeatMap map={map.data} />}
    </>
  );
}

function Rows({ tensor }: { tensor: TensorRef }) {
  const rows = useApi(`rows ${Object.values(tensor).join(" ")}`, (signal) => getRows(tensor, signal));
  const lines = useMemo(
    () => [{ label: "norm", colour: "--series-1" as const, values: rows.data?.norm_mean ?? [] }],
    [rows.data],
  );
  const band = useMemo(
    () => ({ low: rows.data?.norm_min ?? [], high: rows.data?.norm_max ?? [], colour: "--series-1" as const }),
    [rows.data],
  );
  const x = useMemo(() => rows.data?.row_edges.slice(0, -1) ?? [], [rows.data]);
  if (rows.error !== undefined) return <Failure error={rows.error} onRetry={rows.reload} />;
  if (rows.data === undefined) return <Loading rows={5} label="Reading the rows" />;
  const flags: [string, number, readonly number[]][] = [
    ["dead rows (all zero)", rows.data.num_dead, rows.data.dead],
    ["rows with NaN", rows.data.num_with_nan, rows.data.with_nan],
    ["rows with Inf", rows.data.num_with_inf, rows.data.with_inf],
  ];
  return (
    <>
      <div className="plot-head">
        <h3>Norm of each row</h3>
        <span className="muted num">{plural(rows.data.num_rows, "row")}</span>
      </div>
      <LinePlot label={`Row norms of ${tensor.name}`} xLabel="row" {...{ x, lines, band }} />
      <ul className="flags">
        {flags.map(([name, num, which]) => (
          <li key={name} className={num > 0 ? "bad" : ""}>
            <strong className="num">{count(num)}</strong> {name}
            {num > 0 && (
              <span className="muted num">
                : {which.slice(0, 12).join(", ")}
                {num > 12 && " …"}
              </span>
            )}
          </li>
        ))}
      </ul>
    </>
  );
}

function Spectrum({ tensor }: { tensor: TensorRef }) {
  const [isAsked, setAsked] = useState(false);
  const values = useApi(
    `singular values ${Object.values(tensor).join(" ")}`,
    (signal) => getSingularValues(tensor, signal),
    { enabled: isAsked },
  );
  const lines = useMemo(
    () => [{ label: "σ", colour: "--series-1" as const, values: values.data?.values ?? [] }],
    [values.data],
  );
  const x = useMemo(() => (values.data?.values ?? []).map((_, index) => index + 1), [values.data]);
  if (!isAsked) {
    return (
      <div className="ask">
        <p className="muted">The singular values need the whole matrix and some seconds of the server.</p>
        <Button
          onClick={() => {
            setAsked(true);
          }}
        >
          Compute
        </Button>
      </div>
    );
  }
  if (values.error !== undefined) return <Failure error={values.error} onRetry={values.reload} />;
  if (values.data === undefined) return <Loading rows={5} label="Computing" />;
  return (
    <>
      <dl className="statistics">
        <div>
          <dt>effective rank</dt>
          <dd className="num">{number(values.data.effective_rank)}</dd>
        </div>
        <div>
          <dt>stable rank</dt>
          <dd className="num">{number(values.data.stable_rank)}</dd>
        </div>
        <div>
          <dt>condition</dt>
          <dd className="num">{number(values.data.condition)}</dd>
        </div>
      </dl>
      <LinePlot label={`Singular values of ${tensor.name}`} xLabel="index" {...{ x, lines }} isLog />
    </>
  );
}
