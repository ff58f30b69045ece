/** The state of a view lives in the query of its address, so that a link shows the same view. */
import { useCallback, useMemo } from "react";
import { useLocation, useSearch } from "wouter";

export type Patch = Record<string, string | null | undefined>;

/** Returns the query with some parameters changed; null and the empty string remove one. */
export function patched(search: string, patch: Patch): string {
  const params = new URLSearchParams(search);
  for (const [name, value] of Object.entries(patch)) {
    if (value === null || value === undefined || value === "") params.delete(name);
    else params.set(name, value);
  }
  return params.toString();
}

export interface Query {
  get: (name: string) => string;
  /** Changes parameters in place; with `push`, Back returns to the view before. */
  set: (patch: Patch, options?: { push?: boolean }) => void;
  /** Returns the address of a page that keeps the job. */
  href: (path: string, patch?: Patch) => string;
}

export function useQuery(): Query {
  const search = useSearch();
  const [path, navigate] = useLocation();
  const get = useCallback((name: string) => new URLSearchParams(search).get(name) ?? "", [search]);
  const set = useCallback(
    (patch: Patch, options: { push?: boolean } = {}) => {
      // Read the address now: several changes may be made in one tick.
      const query = patched(window.location.search, patch);
      navigate(query === "" ? path : `${path}?${query}`, { replace: !options.push });
    },
    [navigate, path],
  );
  const href = useCallback(
    (to: string, patch: Patch = {}) => {
      const query = patched("", { job: new URLSearchParams(search).get("job"), ...patch });
      return query === "" ? to : `${to}?${query}`;
    },
    [search],
  );
  return useMemo(() => ({ get, set, href }), [get, set, href]);
}
