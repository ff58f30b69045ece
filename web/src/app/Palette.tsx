import { useEffect, useId, useMemo, useRef, useState } from "react";
import { matching, useRegistry } from "@/shared/ui/commands";
import { Icon } from "@/shared/ui/Icon";

const MAX_SHOWN = 50;

/** Calls back on Ctrl K and ⌘ K. */
export function useShortcut(call: () => void): void {
  const latest = useRef(call);
  latest.current = call;
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => {
      if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey) return;
      event.preventDefault();
      latest.current();
    };
    window.addEventListener("keydown", onKey);
    return () => {
      window.removeEventListener("keydown", onKey);
    };
  }, []);
}

/** Finds pages, jobs and commands by typing a part of their name. */
export function Palette({ onClose }: { onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const input = useRef<HTMLInputElement>(null);
  const list = useRef<HTMLDivElement>(null);
  const [query, setQuery] = useState("");
  const [at, setAt] = useState(0);
  const lists = useRegistry((state) => state.lists);
  const id = useId();
  const found = useMemo(
    () => matching([...lists.values()].reverse().flat(), query).slice(0, MAX_SHOWN),
    [lists, query],
  );
  const active = Math.min(at, found.length - 1);

  useEffect(() => {
    dialog.current?.showModal();
    input.current?.focus();
  }, []);
  useEffect(() => {
    list.current?.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
  }, [active]);

  const run = (index: number): void => {
    onClose();
    found[index]?.run();
  };

  return (
    // A click outside the box hits the dialog itself; Escape does the same from the keyboard.
    // eslint-disable-next-line jsx-a11y/no-noninteractive-element-interactions, jsx-a11y/click-events-have-key-events
    <dialog
      ref={dialog}
      className="palette"
      aria-label="Commands"
      onClose={onClose}
      onClick={(event) => {
        if (event.target === dialog.current) onClose();
      }}
    >
      <div className="palette-box">
        <div className="palette-input">
          <Icon name="search" />
          <input
            ref={input}
            role="combobox"
            aria-label="Search pages, jobs and commands"
            aria-expanded="true"
            aria-controls={id}
            aria-activedescendant={found.length === 0 ? undefined : `${id}-${active}`}
            placeholder="Search pages, jobs and commands…"
            value={query}
            spellCheck={false}
            onChange={(event) => {
              setQuery(event.target.value);
              setAt(0);
            }}
            onKeyDown={(event) => {
              if (event.key === "ArrowDown" || event.key === "ArrowUp") {
                event.preventDefault();
                const step = event.key === "ArrowDown" ? 1 : -1;
                setAt((active + step + found.length) % Math.max(found.length, 1));
              } else if (event.key === "Enter") {
                event.preventDefault();
                run(active);
              }
            }}
          />
          <kbd>Esc</kbd>
        </div>
        <div id={id} ref={list} className="palette-list" role="listbox" aria-label="Commands">
          {found.map((command, index) => (
            // The keyboard moves through the list from the input, as a combobox does.
            // eslint-disable-next-line jsx-a11y/click-events-have-key-events
            <div
              key={command.id}
              id={`${id}-${index}`}
              role="option"
              tabIndex={-1}
              aria-selected={index === active}
              onMouseMove={() => {
                setAt(index);
              }}
              onClick={() => {
                run(index);
              }}
            >
              <span className="palette-group">{command.group}</span>
              <span className="truncate">{command.label}</span>
              {command.detail !== undefined && <span className="muted truncate">{command.detail}</span>}
            </div>
          ))}
        </div>
        {found.length === 0 && <p className="palette-none muted">Nothing matches “{query}”.</p>}
      </div>
    </dialog>
  );
}
