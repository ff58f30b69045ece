import { describe, expect, test } from "vitest";
import type { StoredCheckpoint, TreeNode } from "@/shared/api/types";
import { ancestors, type Branch, ROOT, rowsOf } from "./branches";
import { radius, spots } from "./lanes";

function node(kind: "group" | "tensor", path: string): TreeNode {
  return { kind, label: path.split(".").at(-1) ?? "", path, num_tensors: 1, num_bytes: 4, num_elements: 1, num_nan: null, num_inf: null, tensor: null };
}

describe("the tree", () => {
  const branches = new Map<string, Branch>([
    [ROOT, { nodes: [node("group", "model"), node("tensor", "step")], total: 2 }],
    ["model", { nodes: [node("tensor", "model.a")], total: 20_000 }],
  ]);

  test("nothing is loaded at first but the first row asks for it", () => {
    expect(rowsOf(new Map(), new Set())).toEqual([{ kind: "more", under: ROOT, offset: 0, depth: 0 }]);
  });

  test("closed groups hide their children", () => {
    expect(rowsOf(branches, new Set()).map((row) => row.kind === "node" && row.node.path)).toEqual(["model", "step"]);
  });

  test("an open group that is not complete ends with a row that loads the rest", () => {
    const rows = rowsOf(branches, new Set(["model"]));
    expect(rows).toHaveLength(4);
    expect(rows[2]).toEqual({ kind: "more", under: "model", offset: 1, depth: 1 });
  });

  test("a branch of 20,000 tensors is one list of rows", () => {
    const nodes = Array.from({ length: 20_000 }, (_, index) => node("tensor", `t.${index}`));
    expect(rowsOf(new Map([[ROOT, { nodes, total: 20_000 }]]), new Set())).toHaveLength(20_000);
  });

  test("a link to a tensor opens the groups above it", () => {
    expect(ancestors("model.layers.0.weight")).toEqual(["model", "model.layers", "model.layers.0"]);
    expect(ancestors("step")).toEqual([]);
  });
});

describe("the timeline", () => {
  const item = (id: string, created_at_s: number, branch: number): StoredCheckpoint =>
    ({ id, created_at_s, branch, size_bytes: 1 }) as StoredCheckpoint;

  test("checkpoints are placed by time, with a lane per branch", () => {
    const placed = spots([item("c", 30, 1), item("b", 20, 0), item("a", 10, 0)]);
    expect(placed.map((spot) => [spot.item.id, spot.x, spot.lane])).toEqual([["a", 0, 0], ["b", 0.5, 0], ["c", 1, 1]]);
  });

  test("a single checkpoint is in the middle, and small ones stay visible", () => {
    expect(spots([item("a", 10, 0)])[0]?.x).toBe(0.5);
    expect(radius(0, 100)).toBe(4);
    expect(radius(100, 100)).toBe(10);
  });
});
