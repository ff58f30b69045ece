/** The cells of an owner's shards: how many shards each stands for, and how full it is. */
import type { ShardOwner } from "@/shared/api/types";

/** Returns the shards of each cell; the last one may have fewer. */
export function cellSizes(owner: Pick<ShardOwner, "num_shards" | "cells">, perCell: number): number[] {
  return owner.cells.map((_, index) => Math.min(perCell, owner.num_shards - index * perCell));
}

/** Returns the finished share of each cell, from 0 to 1. */
export function shares(owner: Pick<ShardOwner, "num_shards" | "cells">, perCell: number): number[] {
  return cellSizes(owner, perCell).map((size, index) => (size > 0 ? (owner.cells[index] ?? 0) / size : 0));
}

/** Returns in words how evenly the shards are divided: the largest share against the mean. */
export function balance(least: number | null, mean: number | null, most: number | null): string {
  if (least === null || mean === null || most === null || mean === 0) return "no worker";
  if (most - least <= 1) return "even";
  return `the largest has ${(most / mean).toFixed(2)}× the mean`;
}
