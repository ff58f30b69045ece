import { expect, test } from "vitest";
import type { StudyCurve } from "@/shared/api/types";
import { configWords, isPositive, nearest, qualities, sortOf, trialIn, valueWords } from "./views";

const CURVES: StudyCurve[] = [
  { trial: 3, state: "running", steps: [1, 2, 3], values: [9, null, 7] },
  { trial: 4, state: "finished", steps: [1, 2], values: [5, 4] },
];
const same = (value: number): number => value;

test("the best value has quality 1 in both directions, and equal values are equally good", () => {
  expect(qualities([3, 1, 2, 1], "min")).toEqual([0, 1, 0.5, 1]);
  expect(qualities([3, 1, 2, 1], "max")).toEqual([1, 0, 0.5, 0]);
  expect(qualities([7, 7], "min")).toEqual([1, 1]);
  expect(qualities([], "min")).toEqual([]);
});

test("the nearest point is that of a measured value within reach", () => {
  expect(nearest(CURVES, same, same, { x: 2, y: 5 }, 3)).toEqual({ trial: 4, state: "finished", step: 2, value: 4 });
  expect(nearest(CURVES, same, same, { x: 2, y: 100 }, 3)).toBeNull();
  expect(nearest([{ ...CURVES[0], values: [null, null, null] } as StudyCurve], same, same, { x: 1, y: 1 }, 99)).toBeNull();
});

test("a configuration is shown with short numbers and every kind of value", () => {
  expect(configWords({ learning_rate: 0.00312345, layers: 2, use_bias: true, norm: null, optimizer: "adam" })).toBe(
    "learning_rate=0.003123 layers=2 use_bias=true norm=none optimizer=adam",
  );
  expect(valueWords(undefined)).toBe("–");
});

test("values of 0 and below need a linear axis", () => {
  expect(isPositive([1e-9, null, 4])).toBe(true);
  expect(isPositive([1, 0])).toBe(false);
});

test("an address that names no trial or no column changes nothing", () => {
  expect([trialIn("7"), trialIn(""), trialIn("-1"), trialIn("1e3"), trialIn("99999999")]).toEqual([
    ...[7, undefined, undefined, undefined, undefined],
  ]);
  expect(sortOf("value:loss")).toEqual({ sort: "value", name: "loss" });
  expect(sortOf("<script>")).toEqual({ sort: "trial", name: "" });
});
