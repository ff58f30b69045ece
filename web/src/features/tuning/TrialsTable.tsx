import { getTrials } from "@/shared/api/getTrials";
import type { StudyInfo, StudyTrial } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { count, duration, number, plural } from "@/shared/format/numbers";
import { Button } from "@/shared/ui/Button";
import { Select } from "@/shared/ui/Choice";
import { Empty, Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { SearchField } from "@/shared/ui/SearchField";
import { useQuery } from "@/shared/url/useQuery";
import { TrialDot } from "./TrialStates";
import { configWords, numIn, sortOf, TRIAL_STATES } from "./views";

const PAGE = 50;

interface Props {
  found: StudyInfo;
  metric: string;
  trial: number | undefined;
}

/** The trials of a study, filtered, sorted and paged by the server. */
export function TrialsTable({ found, metric, trial }: Props) {
  const { get, set } = useQuery();
  const state: string = TRIAL_STATES.find((each) => each === get("state")) ?? "";
  const text = get("q").slice(0, 200);
  const { sort, name } = sortOf(get("sort"));
  const isKnown = sort !== "value" || found.reported.includes(name);
  const desc = get("desc") === "true";
  const page = Math.max(Number.parseInt(get("page"), 10) || 0, 0);
  const query = { state, text, sort: isKnown ? sort : "trial", name: isKnown ? name : "", desc, limit: PAGE, offset: page * PAGE };
  const { data, error, reload } = useApi(
    `trials ${found.study} ${JSON.stringify(query)} ${found.version}`,
    (signal) => getTrials(found.study, query, signal),
    { keep: true },
  );
  const metrics = [metric, ...found.reported.filter((each) => each !== metric)].slice(0, 3);
  const columns: readonly Column[] = [
    { key: "", label: "Trial", isRight: true },
    { key: "state", label: "State", isRight: false },
    ...metrics.map((each) => ({ key: `value:${each}`, label: each, isRight: true })),
    { key: "step", label: "Step", isRight: true },
    { key: "duration", label: "Time", isRight: true },
  ];
  const first = (data?.offset ?? 0) + 1;
  return (
    <Panel
      title="Trials"
      flush
      detail={data === undefined ? undefined : `${plural(data.total, "trial")}${state === "" && text === "" ? "" : " match"}`}
      actions={
        <>
          <SearchField
            label="Filter by configuration or reason"
            value={text}
            onChange={(q) => {
              set({ q, page: null });
            }}
          />
          <Select
            label="State"
            value={state}
            options={[
              { value: "", label: "Every state" },
              ...TRIAL_STATES.map((each) => ({ value: each as string, label: `${each} (${count(numIn(found.counts, each))})` })),
            ]}
            onChange={(value) => {
              set({ state: value, page: null });
            }}
          />
        </>
      }
    >
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {data === undefined && error === undefined && <Loading rows={6} label="Loading the trials" />}
      {data?.items.length === 0 && (
        <Empty icon="search" title={found.num_trials > 0 && data.total === 0 && state === "" && text === "" ? "No trial has started yet" : "No trial matches"}>
          <Button
            onClick={() => {
              set({ q: null, state: null, page: null });
            }}
          >
            Show all trials
          </Button>
        </Empty>
      )}
      {data !== undefined && data.items.length > 0 && (
        <>
          {/* A region that scrolls must be reachable from the keyboard. */}
          {/* eslint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
          <div className="table-scroll" tabIndex={0} role="group" aria-label="Trials">
            <table className="table tuning-table">
              <thead>
                <tr>
                  {columns.map((column) => (
                    <Head
                      key={column.key}
                      column={column}
                      isSorted={column.key === (sort === "value" ? `value:${name}` : sort === "trial" ? "" : sort)}
                      isDescending={desc}
                      onSort={(isDescending) => {
                        set({ sort: column.key, desc: isDescending ? "true" : null, page: null });
                      }}
                    />
                  ))}
                  <th scope="col">Configuration</th>
                  <th scope="col">Reason</th>
                </tr>
              </thead>
              <tbody>
                {data.items.map((each) => (
                  <Row
                    key={each.number}
                    trial={each}
                    metrics={metrics}
                    isChosen={each.number === trial}
                    onChoose={() => {
                      set({ trial: each.number === trial ? null : each.number.toString() });
                    }}
                  />
                ))}
              </tbody>
            </table>
          </div>
          {data.total > PAGE && (
            <nav className="tuning-pages" aria-label="Pages of trials">
              <Button
                disabled={page === 0}
                onClick={() => {
                  set({ page: page <= 1 ? null : (page - 1).toString() });
                }}
              >
                Previous
              </Button>
              <span className="num">
                {count(first)}–{count(first + data.items.length - 1)} of {count(data.total)}
              </span>
              <Button
                disabled={data.next_offset === null}
                onClick={() => {
                  set({ page: (page + 1).toString() });
                }}
              >
                Next
              </Button>
            </nav>
          )}
        </>
      )}
    </Panel>
  );
}

interface Column {
  /** In the address; empty for the default order. */
  key: string;
  label: string;
  isRight: boolean;
}

interface HeadProps {
  column: Column;
  isSorted: boolean;
  isDescending: boolean;
  onSort: (isDescending: boolean) => void;
}

function Head({ column, isSorted, isDescending, onSort }: HeadProps) {
  return (
    <th
      scope="col"
      className={column.isRight ? "right" : ""}
      aria-sort={isSorted ? (isDescending ? "descending" : "ascending") : "none"}
    >
      <button
        type="button"
        onClick={() => {
          onSort(isSorted && !isDescending);
        }}
      >
        {column.label}
        <span aria-hidden="true">{isSorted ? (isDescending ? " ↓" : " ↑") : ""}</span>
      </button>
    </th>
  );
}

interface RowProps {
  trial: StudyTrial;
  metrics: readonly string[];
  isChosen: boolean;
  onChoose: () => void;
}

function Row({ trial, metrics, isChosen, onChoose }: RowProps) {
  return (
    <tr aria-current={isChosen ? "true" : undefined}>
      <td className="right num">
        <button type="button" className="tuning-choose" aria-pressed={isChosen} aria-label={`Trial ${trial.number}`} onClick={onChoose}>
          {trial.number}
        </button>
      </td>
      <td>
        <span className="tuning-state">
          <TrialDot state={trial.state} /> {trial.state}
          {trial.is_best && <span className="badge ok">best</span>}
          {!trial.is_feasible && trial.state === "finished" && <span className="badge warning">violates</span>}
        </span>
      </td>
      {metrics.map((name) => (
        <td key={name} className="right num">
          {number(trial.values[name])}
        </td>
      ))}
      <td className="right num">{count(trial.step)}</td>
      <td className="right num">{duration(trial.duration_s)}</td>
      <td className="mono">
        <span className="tuning-config truncate" title={configWords(trial.config)}>
          {configWords(trial.config)}
        </span>
      </td>
      <td>
        <span className="tuning-reason truncate muted" title={trial.reason}>
          {trial.reason}
        </span>
      </td>
    </tr>
  );
}
