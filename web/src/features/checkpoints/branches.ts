/** The rows of the tensor tree: what is open, what is loaded, and what must still be loaded. */
import type { TreeNode } from "@/shared/api/types";

export interface Branch {
  nodes: TreeNode[];
  total: number;
}

export type Row =
  | { kind: "node"; node: TreeNode; depth: number; isOpen: boolean }
  | { kind: "more"; under: string; offset: number; depth: number };

/** The key of the root. */
export const ROOT = "";

/** Returns the visible rows; a branch that is open but not complete ends with a row that loads the rest. */
export function rowsOf(branches: ReadonlyMap<string, Branch>, open: ReadonlySet<string>): Row[] {
  const rows: Row[] = [];
  const add = (under: string, depth: number): void => {
    const branch = branches.get(under);
    for (const node of branch?.nodes ?? []) {
      const isOpen = node.kind === "group" && open.has(node.path);
      rows.push({ kind: "node", node, depth, isOpen });
      if (isOpen) add(node.path, depth + 1);
    }
    const numLoaded = branch?.nodes.length ?? 0;
    if (branch === undefined || numLoaded < branch.total) rows.push({ kind: "more", under, offset: numLoaded, depth });
  };
  add(ROOT, 0);
  return rows;
}

/** Returns the groups that may contain a tensor, from the root down. */
export function ancestors(name: string): string[] {
  const parts = name.split(".");
  return parts.slice(1).map((_, index) => parts.slice(0, index + 1).join("."));
}
