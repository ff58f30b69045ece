import { describe, expect, test } from "vitest";
import { aligned, append, csv, emptySeries, fromHistory, positive, smoothed } from "./series";

const points = { name: "metric:loss", unit: "", interval_s: 10, t: [0, 10], min: [1, 2], mean: [2, 3], max: [3, 4] };

describe("live points", () => {
  test("a point within the last bucket of 10 s widens it", () => {
    const series = fromHistory(points);
    append(series, 15, [0, 5, 9], 3600);
    expect(series.t).toEqual([0, 10]);
    expect([series.min[1], series.mean[1], series.max[1]]).toEqual([0, 4, 9]);
  });

  test("a point after the last bucket opens a new one", () => {
    const series = fromHistory(points);
    append(series, 20, [1, 1, 1], 3600);
    expect(series.t).toEqual([0, 10, 20]);
  });

  test("a point that the history has already is dropped", () => {
    const series = fromHistory(points);
    append(series, 10, [7, 7, 7], 3600);
    expect(series.mean).toEqual([2, 3]);
  });

  test("what left the window is dropped, so that an open page does not grow", () => {
    const series = emptySeries("steps_per_s", "steps/s");
    for (let at = 1; at <= 10_000; at += 1) append(series, at, [at, at, at], 300);
    expect(series.t).toHaveLength(301);
    expect(series.max).toHaveLength(301);
    expect(series.t[0]).toBe(9_700);
  });
});

describe("smoothing", () => {
  test("the average starts at the first value, not at zero", () => {
    expect(smoothed([10, 10, 10], 0.9)).toEqual([expect.closeTo(10), expect.closeTo(10), expect.closeTo(10)]);
  });

  test("no weight leaves the values, and gaps stay gaps", () => {
    expect(smoothed([1, null, 3], 0)).toEqual([1, null, 3]);
    expect(smoothed([1, null, 3], 0.5)[1]).toBeNull();
  });
});

describe("alignment", () => {
  test("series with different times share an axis", () => {
    const a = { ...fromHistory(points), name: "a" };
    const b = { ...fromHistory({ ...points, t: [5, 10], mean: [8, 9] }), name: "b" };
    const columns = aligned([a, b]);
    expect(columns.t).toEqual([0, 5, 10]);
    expect(columns.mean).toEqual([[2, null, 3], [null, 8, 9]]);
  });

  test("a coordinator that was away leaves a gap", () => {
    const columns = aligned([fromHistory({ ...points, t: [0, 100] })]);
    expect(columns.t).toEqual([0, 10, 100]);
    expect(columns.mean[0]).toEqual([2, null, 3]);
  });

  test("a logarithmic axis leaves out zero and below", () => {
    expect(positive([1, 0, -1, null])).toEqual([1, null, null, null]);
  });
});

test("the CSV names units and cannot start a formula", () => {
  const text = csv([fromHistory({ ...points, name: '=cmd("x")', unit: "s", t: [0], min: [1], mean: [2], max: [3] })]);
  expect(text.split("\n")[1]).toBe(`1970-01-01T00:00:00.000Z,"'=cmd(""x"")",s,1,2,3`);
});
