import { expect, test } from "vitest";
import { balance, cellSizes, shares } from "./shards";

test("the last cell stands for the shards that are left", () => {
  expect(cellSizes({ num_shards: 10, cells: [4, 2, 1] }, 4)).toEqual([4, 4, 2]);
  expect(shares({ num_shards: 10, cells: [4, 2, 1] }, 4)).toEqual([1, 0.5, 0.5]);
});

test("an owner without shards has no cells", () => {
  expect(shares({ num_shards: 0, cells: [] }, 1)).toEqual([]);
});

test("shards that differ by one are even", () => {
  expect(balance(3, 3.5, 4)).toBe("even");
  expect(balance(1, 4, 8)).toBe("the largest has 2.00× the mean");
  expect(balance(null, null, null)).toBe("no worker");
});
