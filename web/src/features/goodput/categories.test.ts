import { expect, test } from "vitest";
import type { GoodputEntry } from "@/shared/api/types";
import { CATEGORIES, share } from "./categories";

const entry = (parts: GoodputEntry["parts_s"], total: number): GoodputEntry => ({
  attempt: 0,
  began_at_s: 0,
  ended_at_s: total,
  num_ranks: 1,
  total_s: total,
  goodput: null,
  parts_s: parts,
});

test("the shares of all categories add up to one", () => {
  const found = entry({ computing: 6, data: 3, unknown: 1 }, 10);
  const sum = CATEGORIES.reduce((before, each) => before + share(found, each.name), 0);
  expect(sum).toBeCloseTo(1);
});

test("an entry without any time has no shares", () => {
  expect(share(entry({}, 0), "computing")).toBe(0);
});
