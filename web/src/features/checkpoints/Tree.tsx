import { useVirtualizer } from "@tanstack/react-virtual";
import { useCallback, useEffect, useMemo, useRef, useState } from "react";
import { ApiError } from "@/shared/api/client";
import { getTree } from "@/shared/api/getTree";
import type { TreeNode } from "@/shared/api/types";
import { bytes, count } from "@/shared/format/numbers";
import { Icon } from "@/shared/ui/Icon";
import { Failure } from "@/shared/ui/Notice";
import { ancestors, type Branch, type Row, rowsOf } from "./branches";

interface Props {
  place: string;
  id: string;
  chosen: string;
  onChoose: (name: string) => void;
}

const ROW_PX = 30;

/** The tensors by the parts of their names. Branches are loaded when they are opened, and drawn where they are in view. */
export function Tree({ place, id, chosen, onChoose }: Props) {
  const scroll = useRef<HTMLDivElement>(null);
  const [branches, setBranches] = useState<ReadonlyMap<string, Branch>>(new Map());
  const [open, setOpen] = useState<ReadonlySet<string>>(() => new Set(chosen === "" ? [] : ancestors(chosen)));
  const [error, setError] = useState<ApiError>();
  const [at, setAt] = useState(0);
  const loading = useRef(new Set<string>());
  const rows = useMemo(() => rowsOf(branches, open), [branches, open]);
  const view = useVirtualizer({
    count: rows.length,
    getScrollElement: () => scroll.current,
    estimateSize: () => ROW_PX,
    overscan: 20,
  });
  const items = view.getVirtualItems();

  const load = useCallback(
    (under: string, offset: number) => {
      const key = `${offset} ${under}`;
      if (loading.current.has(key)) return;
      loading.current.add(key);
      getTree({ place, id, offset, ...(under === "" ? {} : { under }) })
        .then((page) => {
          setBranches((before) => {
            const held = before.get(under)?.nodes ?? [];
            if (held.length !== offset) return before;
            return new Map(before).set(under, { nodes: [...held, ...page.items], total: page.total });
          });
          // A single group at the top is opened, because nothing else can be chosen.
          const only = page.items[0];
          if (under === "" && page.total === 1 && only?.kind === "group") setOpen((held) => new Set(held).add(only.path));
        })
        .catch((reason: unknown) => {
          setError(reason instanceof ApiError ? reason : new ApiError(0, "", String(reason)));
        })
        .finally(() => loading.current.delete(key));
    },
    [place, id],
  );

  const missing = items.map((item) => rows[item.index]).find((row) => row?.kind === "more");
  const missingUnder = missing?.kind === "more" ? missing.under : undefined;
  const missingOffset = missing?.kind === "more" ? missing.offset : 0;
  useEffect(() => {
    if (missingUnder !== undefined && error === undefined) load(missingUnder, missingOffset);
  }, [missingUnder, missingOffset, load, error]);

  const toggle = (node: TreeNode, isOpen: boolean): void => {
    setOpen((before) => {
      const after = new Set(before);
      if (isOpen) after.delete(node.path);
      else after.add(node.path);
      return after;
    });
  };
  const act = (row: Row | undefined): void => {
    if (row?.kind !== "node") return;
    if (row.node.kind === "group") toggle(row.node, row.isOpen);
    else onChoose(row.node.tensor?.name ?? row.node.path);
  };
  const onKey = (key: string): boolean => {
    const row = rows[at];
    if (key === "ArrowDown" || key === "ArrowUp") {
      const next = Math.min(Math.max(at + (key === "ArrowDown" ? 1 : -1), 0), rows.length - 1);
      setAt(next);
      view.scrollToIndex(next);
    } else if (key === "Home" || key === "End") {
      const next = key === "Home" ? 0 : rows.length - 1;
      setAt(next);
      view.scrollToIndex(next);
    } else if (key === "ArrowRight" || key === "ArrowLeft") {
      if (row?.kind === "node" && row.node.kind === "group" && row.isOpen === (key === "ArrowLeft")) {
        toggle(row.node, row.isOpen);
      }
    } else if (key === "Enter" || key === " ") act(row);
    else return false;
    return true;
  };

  if (error !== undefined) {
    return (
      <Failure
        error={error}
        onRetry={() => {
          setError(undefined);
        }}
      />
    );
  }
  return (
    <div
      ref={scroll}
      className="explorer-scroll"
      role="tree"
      aria-label="Tensors"
      tabIndex={0}
      aria-activedescendant={`tree-row-${at}`}
      onKeyDown={(event) => {
        if (onKey(event.key)) event.preventDefault();
      }}
    >
      <div className="explorer-body" style={{ height: view.getTotalSize() }} role="presentation">
        {items.map((item) => {
          const row = rows[item.index];
          if (row === undefined) return null;
          const style = { transform: `translateY(${item.start}px)`, paddingLeft: 12 + row.depth * 16 };
          if (row.kind === "more") {
            return (
              <div key={item.key} className="tree-row muted" style={style} role="presentation">
                Loading…
              </div>
            );
          }
          const { node } = row;
          const isChosen = node.kind === "tensor" && (node.tensor?.name ?? node.path) === chosen;
          const numBad = (node.num_nan ?? 0) + (node.num_inf ?? 0);
          return (
            // Keys are handled by the tree, which has the focus.
            // eslint-disable-next-line jsx-a11y/click-events-have-key-events
            <div
              key={item.key}
              id={`tree-row-${item.index}`}
              role="treeitem"
              tabIndex={-1}
              aria-level={row.depth + 1}
              aria-expanded={node.kind === "group" ? row.isOpen : undefined}
              aria-selected={isChosen}
              className={`tree-row ${item.index === at ? "active" : ""}`}
              style={style}
              onClick={() => {
                setAt(item.index);
                act(row);
              }}
            >
              <span className={`tree-icon ${row.isOpen ? "open" : ""}`}>
                <Icon name={node.kind === "group" ? "chevron" : "tensor"} size={12} />
              </span>
              <span className="truncate mono" title={node.path}>
                {node.label}
              </span>
              {numBad > 0 && <span className="badge error">{count(numBad)} NaN/Inf</span>}
              <span className="tree-note num">
                {node.tensor === null ? count(node.num_tensors) : shapeWords(node.tensor.shape)}
              </span>
              <span className="tree-bytes num">{bytes(node.num_bytes)}</span>
            </div>
          );
        })}
      </div>
    </div>
  );
}

export function shapeWords(shape: readonly number[]): string {
  return shape.length === 0 ? "scalar" : shape.join(" × ");
}
