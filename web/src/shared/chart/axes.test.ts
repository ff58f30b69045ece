import { expect, test } from "vitest";
import { scale, ticks } from "./axes";

test("ticks are round and inside the domain", () => {
  expect(ticks(0, 10, 5)).toEqual([0, 2, 4, 6, 8, 10]);
  expect(ticks(-0.11, 0.12, 4)).toEqual([-0.1, 0, 0.1]);
  expect(ticks(3, 3, 5)).toEqual([3]);
});

test("a scale maps both ways", () => {
  const x = scale(-1, 1, 50, 250);
  expect(x(0)).toBe(150);
  expect(x.invert(250)).toBe(1);
});
