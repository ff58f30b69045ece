import { useMemo } from "react";
import { getComparedHistogram } from "@/shared/api/getComparedHistogram";
import type { StoredCheckpoint, TensorRef } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { count, number, percent } from "@/shared/format/numbers";
import { Failure, Loading } from "@/shared/ui/Notice";
import type { Against } from "./Explorer";
import { Histogram } from "./Histogram";

interface Props {
  tensor: TensorRef;
  item: StoredCheckpoint;
  against: Against;
}

function nameOf(item: StoredCheckpoint): string {
  return item.step === null ? item.id : `step ${count(item.step)}`;
}

/** One tensor in two checkpoints: how far it moved, and its distribution before and after. */
export function ComparedTensorView({ tensor, item, against }: Props) {
  const query = { ...tensor, against_place: against.place.place, against: against.item.id };
  const loaded = useApi(`compared ${Object.values(query).join(" ")}`, (signal) => getComparedHistogram(query, signal));
  const isNamed = against.place.place === tensor.place || against.place.label === against.item.id;
  const before = isNamed ? nameOf(against.item) : `${against.place.label}, ${nameOf(against.item)}`;
  const bars = useMemo(
    () => [
      { label: `before, ${before}`, colour: "--series-2" as const, counts: loaded.data?.old.counts ?? [] },
      { label: `after, ${nameOf(item)}`, colour: "--series-1" as const, counts: loaded.data?.new.counts ?? [] },
    ],
    [before, item, loaded.data],
  );
  const change = loaded.data?.change;
  return (
    <div className="tensor">
      <header>
        <h2 className="mono">{tensor.name}</h2>
        <p className="muted">
          {before} → {nameOf(item)}
        </p>
      </header>
      {loaded.error !== undefined && <Failure error={loaded.error} onRetry={loaded.reload} />}
      {loaded.data === undefined && loaded.error === undefined && <Loading rows={6} label="Reading both tensors" />}
      {change !== undefined && (
        <dl className="statistics">
          <div>
            <dt>‖new − old‖ / ‖old‖</dt>
            <dd className="num">{change.relative_l2 === null ? change.state : percent(change.relative_l2)}</dd>
          </div>
          <div>
            <dt>‖new − old‖</dt>
            <dd className="num">{number(change.l2)}</dd>
          </div>
          <div>
            <dt>largest difference</dt>
            <dd className="num">{number(change.max_abs)}</dd>
          </div>
          <div>
            <dt>elements that differ</dt>
            <dd className="num">
              {count(change.num_different)} of {count(loaded.data?.new.num_elements)}
            </dd>
          </div>
        </dl>
      )}
      {loaded.data !== undefined && loaded.data.edges.length > 1 && (
        <>
          <h3>Distribution before and after</h3>
          <Histogram
            label={`Distribution of ${tensor.name} before and after`}
            edges={loaded.data.edges}
            bars={bars}
            isLog={false}
            height={240}
          />
        </>
      )}
    </div>
  );
}
