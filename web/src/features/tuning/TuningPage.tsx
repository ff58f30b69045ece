import { useEffect, useState } from "react";
import { getStudies } from "@/shared/api/getStudies";
import { getStudy } from "@/shared/api/getStudy";
import type { StudyInfo, StudyRef } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { count, duration, number, plural } from "@/shared/format/numbers";
import { Select } from "@/shared/ui/Choice";
import { Command, Empty, Failure, Loading } from "@/shared/ui/Notice";
import { Tile } from "@/shared/ui/Tile";
import { useQuery } from "@/shared/url/useQuery";
import { BestSoFar } from "./BestSoFar";
import { Curves } from "./Curves";
import { Importances } from "./Importances";
import { Parallel } from "./Parallel";
import { Pareto } from "./Pareto";
import { TrialDetails } from "./TrialDetails";
import { TrialsTable } from "./TrialsTable";
import { TrialStates } from "./TrialStates";
import { numIn, trialIn } from "./views";
import "./tuning.css";

/** Seconds between two looks at a study; the answers for many trials take longer, so they are asked for less often. */
const EVERY_S = 1;
const MANY = 2_000;
const EVERY_MANY_S = 5;

export default function TuningPage() {
  const studies = useApi("studies", getStudies);
  const { get } = useQuery();
  const chosen = studies.data?.find((each) => each.study === get("study")) ?? studies.data?.[0];
  if (chosen !== undefined) return <Study key={chosen.study} chosen={chosen} studies={studies.data ?? []} />;
  return (
    <div className="page">
      <h1>Tuning</h1>
      {studies.isLoading && <Loading rows={6} label="Loading the study" />}
      {studies.error !== undefined && <Failure error={studies.error} onRetry={studies.reload} />}
      {studies.data?.length === 0 && (
        <Empty icon="tuning" title="No study here">
          <p>A study prints the address of its own page:</p>
          <Command>strata tune train.py --space space.yaml</Command>
          <p>One that is over opens with its name or its directory:</p>
          <Command>strata dashboard NAME</Command>
        </Empty>
      )}
    </div>
  );
}

function Study({ chosen, studies }: { chosen: StudyRef; studies: StudyRef[] }) {
  const { get, set } = useQuery();
  const [isMany, setMany] = useState(false);
  const info = useApi(`study ${chosen.study}`, (signal) => getStudy(chosen.study, signal), {
    everyS: isMany ? EVERY_MANY_S : EVERY_S,
  });
  const found = info.data;
  const numTrials = found?.num_trials ?? 0;
  useEffect(() => {
    setMany(numTrials > MANY);
  }, [numTrials]);
  const metric = found?.reported.find((each) => each === get("metric")) ?? found?.reported[0] ?? "";
  const trial = trialIn(get("trial"));
  return (
    <div className="page tuning-page">
      <div className="page-head">
        <div className="tuning-title">
          <h1>Tuning</h1>
          <p className="lead">{found === undefined ? chosen.name : lead(found)}</p>
        </div>
        <div className="page-tools">
          {studies.length > 1 && (
            <Select
              label="Study"
              value={chosen.study}
              options={studies.map((each) => ({ value: each.study, label: each.name }))}
              onChange={(study) => {
                set({ study, metric: null, trial: null, sort: null, page: null, x: null, y: null }, { push: true });
              }}
            />
          )}
          {found !== undefined && found.reported.length > 1 && (
            <Select
              label="Metric"
              value={metric}
              options={found.reported.map((each) => ({ value: each, label: each }))}
              onChange={(value) => {
                set({ metric: value });
              }}
            />
          )}
        </div>
      </div>
      {info.error !== undefined && <Failure error={info.error} onRetry={info.reload} />}
      {found === undefined && info.error === undefined && <Loading rows={6} label="Loading the study" />}
      {found !== undefined && (
        <>
          <Figures found={found} />
          <TrialStates counts={found.counts} />
          <div className="tuning-grid">
            <BestSoFar {...{ found, metric }} />
            <Curves {...{ found, metric, trial }} />
          </div>
          <Parallel {...{ found, metric, trial }} />
          <div className="tuning-grid">
            <Importances {...{ found, metric }} />
            {found.reported.length > 1 && <Pareto {...{ found, trial }} />}
          </div>
          <TrialsTable {...{ found, metric, trial }} />
          {trial !== undefined && <TrialDetails {...{ found, trial }} />}
        </>
      )}
    </div>
  );
}

function lead(found: StudyInfo): string {
  const aims = found.metrics.map((name, place) => `${found.directions[place] ?? "min"} ${name}`);
  const why = found.reason === "" ? "" : ` (${found.reason})`;
  return [found.name, found.mode, aims.join(", "), `${found.state}${why}`].join(" · ");
}

function Figures({ found }: { found: StudyInfo }) {
  const { counts, best } = found;
  const numEnded = numIn(counts, "finished") + numIn(counts, "pruned") + numIn(counts, "failed");
  const first = found.metrics[0] ?? "";
  return (
    <dl className="tiles">
      <Tile label="Trials ended" value={count(numEnded)} detail={`of ${count(found.num_trials)}`} />
      <Tile label="Running" value={count(numIn(counts, "running"))} detail={`on ${plural(found.num_slots, "slot")}`} />
      <Tile label="Failed" value={count(numIn(counts, "failed"))} />
      <Tile
        label={`Best ${first}`}
        value={number(best?.values[first])}
        detail={best === null ? "no trial has finished" : `trial ${best.number}`}
      />
      {found.metrics.length > 1 && <Tile label="Pareto front" value={count(found.num_best)} detail="trials" />}
      <Tile label="Active for" value={duration(found.active_s)} />
      <Tile label="Left" value={duration(found.left_s)} detail={found.left_s === null ? undefined : "estimate"} />
    </dl>
  );
}
