import { useVirtualizer } from "@tanstack/react-virtual";
import { type ReactNode, useRef } from "react";

interface Props<Item> {
  label: string;
  items: readonly Item[];
  nameOf: (item: Item) => string;
  chosen: string;
  onChoose: (name: string) => void;
  children: (item: Item) => ReactNode;
}

const ROW_PX = 30;

/** A long list of tensors to choose from. */
export function FlatList<Item>({ label, items, nameOf, chosen, onChoose, children }: Props<Item>) {
  const scroll = useRef<HTMLDivElement>(null);
  const view = useVirtualizer({
    count: items.length,
    getScrollElement: () => scroll.current,
    estimateSize: () => ROW_PX,
    overscan: 20,
  });
  return (
    <div ref={scroll} className="explorer-scroll">
      <ul className="explorer-body" style={{ height: view.getTotalSize() }} aria-label={label}>
        {view.getVirtualItems().map((row) => {
          const item = items[row.index];
          if (item === undefined) return null;
          const name = nameOf(item);
          return (
            <li key={name} style={{ transform: `translateY(${row.start}px)` }} className="flat-row">
              <button
                type="button"
                className="tree-row"
                aria-current={name === chosen ? "true" : undefined}
                onClick={() => {
                  onChoose(name);
                }}
              >
                {children(item)}
              </button>
            </li>
          );
        })}
      </ul>
    </div>
  );
}
