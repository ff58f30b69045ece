import type { Place, StoredCheckpoint } from "@/shared/api/types";
import { Button } from "@/shared/ui/Button";
import { Select } from "@/shared/ui/Choice";
import { Empty } from "@/shared/ui/Notice";
import { SearchField } from "@/shared/ui/SearchField";
import { useQuery } from "@/shared/url/useQuery";
import { ChangeList } from "./ChangeList";
import { ComparedTensorView } from "./ComparedTensorView";
import { TensorList } from "./TensorList";
import { TensorView } from "./TensorView";
import { Tree } from "./Tree";

/** The older side of a comparison, perhaps of another run. */
export interface Against {
  place: Place;
  item: StoredCheckpoint;
}

interface Props {
  place: string;
  item: StoredCheckpoint;
  against: Against | undefined;
}

const PROPERTIES = [
  { value: "", label: "Any property" },
  { value: "not_finite", label: "has NaN or Inf" },
  { value: "nan", label: "has NaN" },
  { value: "inf", label: "has Inf" },
  { value: "dead_rows", label: "has dead rows" },
  { value: "constant", label: "is constant" },
  { value: "zero", label: "is zero" },
];
const SORTS = [
  { value: "", label: "In order" },
  { value: "name", label: "By name" },
  { value: "bytes", label: "Largest first" },
  { value: "norm", label: "Largest norm first" },
  { value: "max_abs", label: "Largest value first" },
  { value: "std", label: "Widest first" },
];

/** Tensors on the left as a tree, a list or ranked changes; the chosen one on the right. */
export function Explorer({ place, item, against }: Props) {
  const { get, set } = useQuery();
  const search = get("search");
  const property = get("property");
  const sort = get("sort");
  const name = get("name");
  const isFlat = search !== "" || property !== "" || sort !== "";
  const choose = (chosen: string): void => {
    set({ name: chosen });
  };
  return (
    <section className="panel explorer" aria-label={against === undefined ? "Tensors" : "Changes"}>
      <div className="explorer-side">
        <div className="explorer-tools">
          <SearchField
            label="Find tensors"
            placeholder="Find tensors: name or *.weight"
            value={search}
            onChange={(value) => {
              set({ search: value });
            }}
          />
          {against === undefined ? (
            <div className="explorer-selects">
              <Select
                label="Property"
                value={property}
                options={PROPERTIES}
                onChange={(value) => {
                  set({ property: value });
                }}
              />
              <Select
                label="Order"
                value={sort}
                options={SORTS}
                onChange={(value) => {
                  set({ sort: value });
                }}
              />
            </div>
          ) : (
            <div className="explorer-against">
              <span>
                Changes since{" "}
                <strong>
                  {against.place.place === place || against.place.label === against.item.id ? "" : `${against.place.label}, `}
                  {against.item.step === null ? against.item.id : `step ${against.item.step}`}
                </strong>
              </span>
              <Button
                look="quiet"
                icon="close"
                aria-label="Stop comparing"
                onClick={() => {
                  set({ against: null, against_place: null });
                }}
              />
            </div>
          )}
        </div>
        {against !== undefined ? (
          <ChangeList {...{ place, search, against, chosen: name }} id={item.id} onChoose={choose} />
        ) : isFlat ? (
          <TensorList {...{ place, search, property, sort, chosen: name }} id={item.id} onChoose={choose} />
        ) : (
          <Tree key={`${place} ${item.id}`} place={place} id={item.id} chosen={name} onChoose={choose} />
        )}
      </div>
      <div className="explorer-main">
        {name === "" ? (
          <Empty icon="tensor" title="Choose a tensor">
            Its statistics, distribution and values appear here. Only the bytes that are needed are read.
          </Empty>
        ) : against === undefined ? (
          <TensorView key={`${item.id} ${name}`} tensor={{ place, id: item.id, name }} />
        ) : (
          <ComparedTensorView
            key={`${item.id} ${against.place.place} ${against.item.id} ${name}`}
            tensor={{ place, id: item.id, name }}
            against={against}
            item={item}
          />
        )}
      </div>
    </section>
  );
}
