/** The charts of the servers' totals, and what a missing hit rate means. */
export const CHARTS: readonly { name: string; title: string }[] = [
  { name: "servers.pulls_per_s", title: "Pulls per second" },
  { name: "servers.pushes_per_s", title: "Pushes per second" },
  { name: "servers.rows", title: "Rows" },
  { name: "servers.bytes", title: "Memory" },
  { name: "servers.staleness", title: "Staleness" },
  { name: "servers.hit_rate", title: "Hit rate" },
];

/** A hit rate exists only where a part of a table is in a file. */
export function lookups(hitRate: number | null | undefined): string {
  return hitRate === null || hitRate === undefined ? "no table has a file (memory_rows=)" : "pulled rows found in memory";
}
