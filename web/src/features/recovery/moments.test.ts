import { expect, test } from "vitest";
import { inOrder } from "./moments";

test("moments are in the order of their times, without those that did not happen", () => {
  const found = inOrder([
    { name: "detected", at_s: 10, after_s: 0 },
    { name: "generation", at_s: 12, after_s: 2 },
    { name: "started", at_s: 11, after_s: 1 },
    { name: "loaded", at_s: null, after_s: null },
  ]);
  expect(found.map((each) => [each.name, each.since_s])).toEqual([
    ["detected", 0],
    ["started", 1],
    ["generation", 1],
  ]);
});
