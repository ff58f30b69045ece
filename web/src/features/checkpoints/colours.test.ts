import { expect, test } from "vitest";
import { diverging, parse } from "./colours";

test("zero is the middle, and the ends are reached at −1 and 1", () => {
  const palette = { low: parse("#0072b2"), middle: parse("#ffffff"), high: parse("#d55e00") };
  expect(diverging(0, palette)).toEqual([255, 255, 255]);
  expect(diverging(-1, palette)).toEqual([0, 114, 178]);
  expect(diverging(2, palette)).toEqual([213, 94, 0]);
});
