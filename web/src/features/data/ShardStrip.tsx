import { useCallback } from "react";
import type { ShardOwner } from "@/shared/api/types";
import { Canvas } from "@/shared/chart/Canvas";
import { count } from "@/shared/format/numbers";
import { token } from "@/shared/theme/theme";
import { shares } from "./shards";

const HEIGHT = 14;
/** The widest cell, so that a worker with three shards does not fill the row. */
const MAX_CELL_PX = 18;

interface Props {
  owner: ShardOwner;
  perCell: number;
  /** Cells of the owner that has the most. */
  mostCells: number;
}

/** The shards of one owner in the order of reading; a cell is filled from below by its finished part. */
export function ShardStrip({ owner, perCell, mostCells }: Props) {
  const key = owner.cells.join(" ");
  const draw = useCallback(
    (context: CanvasRenderingContext2D, { width }: { width: number }) => {
      const cell = Math.min(width / Math.max(mostCells, 1), MAX_CELL_PX);
      const gap = cell > 4 ? 1 : 0;
      const [empty, full] = [token("--border-strong"), token("--state-training")];
      shares(owner, perCell).forEach((share, index) => {
        context.fillStyle = empty;
        context.fillRect(index * cell, 0, Math.max(cell - gap, 1), HEIGHT);
        context.fillStyle = full;
        context.fillRect(index * cell, HEIGHT * (1 - share), Math.max(cell - gap, 1), HEIGHT * share);
      });
    },
    // The cells come with every answer as a new list; draw again only if they differ.
    // eslint-disable-next-line react-hooks/exhaustive-deps
    [key, owner.num_shards, perCell, mostCells],
  );
  return (
    <Canvas label={`${count(owner.num_done)} of ${count(owner.num_shards)} shards done`} height={HEIGHT} draw={draw} />
  );
}
