import { expect, test } from "vitest";
import { CHARTS, lookups } from "./figures";

test("a hit rate of zero is measured, a missing one is not", () => {
  expect(lookups(0)).toBe("pulled rows found in memory");
  expect(lookups(null)).toBe("no table has a file (memory_rows=)");
});

test("every chart is a series of servers", () => {
  expect(CHARTS.every(({ name }) => name.startsWith("servers."))).toBe(true);
});
