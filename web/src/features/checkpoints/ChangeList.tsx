import { getComparison } from "@/shared/api/getComparison";
import type { ComparedTensor } from "@/shared/api/types";
import { count, percent } from "@/shared/format/numbers";
import { Empty, Failure, Loading } from "@/shared/ui/Notice";
import { FlatList } from "./FlatList";
import type { Against } from "./Explorer";
import { ScanNote } from "./ScanNote";
import { useScan } from "./useScan";

interface Props {
  place: string;
  id: string;
  against: Against;
  search: string;
  chosen: string;
  onChoose: (name: string) => void;
}

export function changeWords({ change }: ComparedTensor): string {
  if (change.state !== "changed") return change.state;
  if (change.relative_l2 !== null) return percent(change.relative_l2);
  return change.at_least === null ? "changed" : `≥ ${percent(change.at_least)}`;
}

/** The tensors that differ between two checkpoints, the largest relative change first. */
export function ChangeList({ place, id, against, search, chosen, onChoose }: Props) {
  const key = [place, id, against.place.place, against.item.id, search].join("\n");
  const query = { place, id, against_place: against.place.place, against: against.item.id, search, offset: 0 };
  const { data, error } = useScan(key, (signal) => getComparison(query, signal));
  if (error !== undefined) return <Failure error={error} />;
  if (data === undefined) return <Loading rows={8} label="Comparing" />;
  const largest = Math.max(...data.items.map((item) => item.change.relative_l2 ?? 0), 1e-12);
  return (
    <>
      <ScanNote
        scan={data.scan}
        num={data.num_changed + data.num_added + data.num_removed + data.num_reshaped}
        what={`changed, ${count(data.num_same)} the same`}
      />
      {data.items.length === 0 && data.scan.is_complete && (
        <Empty icon="ok" title="No differences">
          Both checkpoints hold the same tensors with the same contents.
        </Empty>
      )}
      <FlatList label="Changes, largest first" items={data.items} nameOf={(item) => item.name} {...{ chosen, onChoose }}>
        {(item) => (
          <>
            <span className="truncate mono" title={item.name}>
              {item.name}
            </span>
            <span className="change-bar" aria-hidden="true">
              <span style={{ width: `${((item.change.relative_l2 ?? 0) / largest) * 100}%` }} />
            </span>
            <span className="tree-bytes num">{changeWords(item)}</span>
          </>
        )}
      </FlatList>
    </>
  );
}
