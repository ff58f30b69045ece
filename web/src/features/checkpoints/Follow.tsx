import { useMemo } from "react";
import { getFollowed } from "@/shared/api/getFollowed";
import type { TensorRef } from "@/shared/api/types";
import { LinePlot } from "@/shared/chart/LinePlot";
import { Failure, Loading } from "@/shared/ui/Notice";
import { ScanNote } from "./ScanNote";
import { useScan } from "./useScan";

/** One tensor in all checkpoints of its place: range, mean and norm over the steps. */
export function Follow({ tensor }: { tensor: TensorRef }) {
  const { place, name } = tensor;
  const { data, error } = useScan(`${place}\n${name}`, (signal) => getFollowed({ place, name }, signal));
  const present = useMemo(() => (data?.items ?? []).filter((item) => item.is_present), [data]);
  const x = useMemo(() => present.map((item, index) => item.step ?? index), [present]);
  const columns = useMemo(() => {
    const of = (pick: "min" | "max" | "mean" | "std" | "norm"): (number | null)[] =>
      present.map((item) => item.statistics?.[pick] ?? null);
    return {
      range: [{ label: "mean", colour: "--series-1" as const, values: of("mean") }],
      band: { low: of("min"), high: of("max"), colour: "--series-1" as const },
      norm: [{ label: "norm", colour: "--series-3" as const, values: of("norm") }],
      std: [{ label: "std", colour: "--series-2" as const, values: of("std") }],
    };
  }, [present]);
  if (error !== undefined) return <Failure error={error} />;
  if (data === undefined) return <Loading rows={5} label="Reading all checkpoints" />;
  const numChanged = present.filter((item) => item.changed === true).length;
  return (
    <>
      <ScanNote scan={data.scan} num={present.length} what={`checkpoints hold it; it changed in ${numChanged}`} />
      {present.length < 2 && <p className="muted">A second checkpoint is needed to see how it develops.</p>}
      {present.length >= 2 && (
        <>
          <h3>Mean, from the smallest to the largest element</h3>
          <LinePlot label={`Mean of ${name} over steps`} xLabel="step" x={x} lines={columns.range} band={columns.band} />
          <h3>Norm</h3>
          <LinePlot label={`Norm of ${name} over steps`} xLabel="step" x={x} lines={columns.norm} height={130} />
          <h3>Standard deviation</h3>
          <LinePlot label={`Standard deviation of ${name} over steps`} xLabel="step" x={x} lines={columns.std} height={130} />
        </>
      )}
    </>
  );
}
