import { useCallback, useState } from "react";
import type { TensorHeatMap } from "@/shared/api/types";
import { Canvas } from "@/shared/chart/Canvas";
import { count, number } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";
import { diverging, parse } from "./colours";

const MAX_PX = 320;
const LEAST_PX = 40;

/** Block means of a matrix: blue below zero, orange above, the surface at zero; blocks with NaN or Inf are marked. */
export function HeatMap({ map }: { map: TensorHeatMap }) {
  const [at, setAt] = useState<[number, number] | null>(null);
  const numRows = map.means.length;
  const numColumns = map.means[0]?.length ?? 0;
  const height = Math.min(Math.max(numRows * 3, LEAST_PX), MAX_PX);
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width, height: tall }: { width: number; height: number }) => {
      const bound = Math.max(Math.abs(map.min ?? 0), Math.abs(map.max ?? 0)) || 1;
      const palette = {
        low: parse(token("--series-1")),
        middle: parse(token("--sunken")),
        high: parse(token("--series-2")),
      };
      const bad = parse(token("--series-4"));
      const image = context.createImageData(numColumns, numRows);
      map.means.forEach((row, i) => {
        row.forEach((mean, j) => {
          const isBad = (map.num_not_finite[i]?.[j] ?? 0) > 0;
          const colour = isBad || mean === null ? bad : diverging(mean / bound, palette);
          image.data.set([...colour, 255], (i * numColumns + j) * 4);
        });
      });
      const small = document.createElement("canvas");
      small.width = numColumns;
      small.height = numRows;
      small.getContext("2d")?.putImageData(image, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(small, 0, 0, width, tall);
    },
    [map, numColumns, numRows],
  );
  const shown = at === null ? undefined : map.means[at[0]]?.[at[1]];
  return (
    <figure className="plot heatmap">
      <Canvas
        label={`Heat map of ${count(map.num_rows)} rows and ${count(map.num_columns)} columns, block means from ${number(map.min)} to ${number(map.max)}`}
        {...{ height, draw }}
        onPoint={(pointer) => {
          if (pointer === null) {
            setAt(null);
            return;
          }
          const i = Math.min(Math.floor((pointer.y / height) * numRows), numRows - 1);
          const j = Math.min(Math.floor((pointer.x / pointer.width) * numColumns), numColumns - 1);
          setAt([Math.max(i, 0), Math.max(j, 0)]);
        }}
      />
      <figcaption className="num">
        <span className="heat-scale" aria-hidden="true" />
        <span className="muted">
          {number(-Math.max(Math.abs(map.min ?? 0), Math.abs(map.max ?? 0)), 3)} to{" "}
          {number(Math.max(Math.abs(map.min ?? 0), Math.abs(map.max ?? 0)), 3)}
        </span>
        {at !== null && (
          <span>
            rows {count(map.row_edges[at[0]])}–{count((map.row_edges[at[0] + 1] ?? 1) - 1)}, columns{" "}
            {count(map.column_edges[at[1]])}–{count((map.column_edges[at[1] + 1] ?? 1) - 1)}: mean{" "}
            <strong>{shown === null || shown === undefined ? "not finite" : number(shown)}</strong>
          </span>
        )}
      </figcaption>
    </figure>
  );
}
