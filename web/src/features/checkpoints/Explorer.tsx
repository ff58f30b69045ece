import type { StoredCheckpoint } from "@/shared/api/types";
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

interface Props {
  place: string;
  item: StoredCheckpoint;
  items: readonly StoredCheckpoint[];
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
export function Explorer({ place, item, items }: Props) {
  const { get, set } = useQuery();
  const search = get("search");
  const property = get("property");
  const sort = get("sort");
  const name = get("name");
  const against = items.find((each) => each.id === get("against") && each.id !== item.id);
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
                Changes since <strong>{against.step === null ? against.id : `step ${against.step}`}</strong>
              </span>
              <Button
                look="quiet"
                icon="close"
                aria-label="Stop comparing"
                onClick={() => {
                  set({ against: null });
                }}
              />
            </div>
          )}
        </div>
        {against !== undefined ? (
          <ChangeList {...{ place, search, chosen: name }} id={item.id} against={against.id} onChoose={choose} />
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
            key={`${item.id} ${against.id} ${name}`}
            tensor={{ place, id: item.id, name }}
            against={against}
            item={item}
          />
        )}
      </div>
    </section>
  );
}
