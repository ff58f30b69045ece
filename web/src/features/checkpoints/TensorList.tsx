import { getTensors } from "@/shared/api/getTensors";
import { bytes, count, number } from "@/shared/format/numbers";
import { Empty, Failure, Loading } from "@/shared/ui/Notice";
import { FlatList } from "./FlatList";
import { ScanNote } from "./ScanNote";
import { shapeWords } from "./Tree";
import { useScan } from "./useScan";

interface Props {
  place: string;
  id: string;
  search: string;
  property: string;
  sort: string;
  chosen: string;
  onChoose: (name: string) => void;
}

/** Tensors found by name and property. */
export function TensorList({ place, id, search, property, sort, chosen, onChoose }: Props) {
  const key = [place, id, search, property, sort].join("\n");
  const { data, error, isLoading } = useScan(key, (signal) =>
    getTensors({ place, id, search, property, sort, offset: 0 }, signal),
  );
  if (error !== undefined) return <Failure error={error} />;
  if (data === undefined) return <Loading rows={8} label="Searching" />;
  return (
    <>
      <ScanNote
        scan={data.scan}
        num={data.total}
        what={data.total > data.items.length ? `tensors, the first ${count(data.items.length)} shown` : "tensors"}
      />
      {data.items.length === 0 && !isLoading && (
        <Empty icon="search" title="No tensor matches">
          Try a part of a name, a pattern such as *.bias, or another property.
        </Empty>
      )}
      <FlatList label="Tensors found" items={data.items} nameOf={(tensor) => tensor.name} {...{ chosen, onChoose }}>
        {(tensor) => (
          <>
            <span className="truncate mono" title={tensor.name}>
              {tensor.name}
            </span>
            {sort === "norm" && <span className="tree-note num">‖·‖ {number(tensor.statistics?.norm, 3)}</span>}
            {sort === "std" && <span className="tree-note num">σ {number(tensor.statistics?.std, 3)}</span>}
            {sort !== "norm" && sort !== "std" && <span className="tree-note num">{shapeWords(tensor.shape)}</span>}
            <span className="tree-bytes num">{bytes(tensor.num_bytes)}</span>
          </>
        )}
      </FlatList>
    </>
  );
}
