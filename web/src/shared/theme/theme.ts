import { create } from "zustand";

export type Choice = "system" | "light" | "dark";
export type Theme = "light" | "dark";

const KEY = "strata-theme";
const CHOICES: readonly Choice[] = ["system", "light", "dark"];

/** Returns the theme to show for a choice. */
export function resolve(choice: Choice, systemIsDark: boolean): Theme {
  return choice === "system" ? (systemIsDark ? "dark" : "light") : choice;
}

function stored(): Choice {
  try {
    const found = localStorage.getItem(KEY);
    return CHOICES.find((choice) => choice === found) ?? "system";
  } catch {
    return "system"; // storage is switched off
  }
}

interface ThemeState {
  choice: Choice;
  theme: Theme;
  choose: (choice: Choice) => void;
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");

export const useTheme = create<ThemeState>()((set) => ({
  choice: stored(),
  theme: resolve(stored(), dark.matches),
  choose: (choice) => {
    try {
      localStorage.setItem(KEY, choice);
    } catch {
      // The choice then lasts until the page is closed.
    }
    set({ choice, theme: resolve(choice, dark.matches) });
  },
}));

/** Applies the theme to the document and follows the system's preference. */
export function installTheme(): void {
  const apply = (theme: Theme): void => {
    document.documentElement.dataset["theme"] = theme;
  };
  apply(useTheme.getState().theme);
  useTheme.subscribe((state) => {
    apply(state.theme);
  });
  dark.addEventListener("change", () => {
    useTheme.setState(({ choice }) => ({ theme: resolve(choice, dark.matches) }));
  });
}

/** Returns the value of a design token, for what is drawn on a canvas. */
export function token(name: `--${string}`): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
