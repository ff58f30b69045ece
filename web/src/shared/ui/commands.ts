/** Commands of the palette: the shell's own, and those that the open page adds. */
import { useEffect } from "react";
import { create } from "zustand";

export interface Command {
  id: string;
  group: string;
  label: string;
  detail?: string;
  run: () => void;
}

interface Registry {
  lists: ReadonlyMap<string, readonly Command[]>;
}

export const useRegistry = create<Registry>()(() => ({ lists: new Map() }));

/** Offers commands while the component is mounted. Pass a stable list. */
export function useCommands(owner: string, commands: readonly Command[]): void {
  useEffect(() => {
    useRegistry.setState(({ lists }) => ({ lists: new Map(lists).set(owner, commands) }));
    return () => {
      useRegistry.setState(({ lists }) => {
        const rest = new Map(lists);
        rest.delete(owner);
        return { lists: rest };
      });
    };
  }, [owner, commands]);
}

/** Returns the commands that match all words of a query, those that start with it first. */
export function matching(commands: readonly Command[], query: string): Command[] {
  const words = query.toLowerCase().split(/\s+/).filter((word) => word !== "");
  const scored = commands.flatMap((command) => {
    const text = `${command.group} ${command.label} ${command.detail ?? ""}`.toLowerCase();
    if (!words.every((word) => text.includes(word))) return [];
    return [{ command, score: command.label.toLowerCase().startsWith(words[0] ?? "") ? 0 : 1 }];
  });
  return scored.sort((a, b) => a.score - b.score).map(({ command }) => command);
}
