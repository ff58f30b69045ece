import { describe, expect, test } from "vitest";
import { bytes, compact, count, duration, number, percent, withUnit } from "./numbers";

describe("numbers", () => {
  test.each([
    [null, "–"],
    [Number.NaN, "–"],
    [0, "0"],
    [12.5, "12.5"],
    [51_200, "51,200"],
    [0.03141, "0.03141"],
    [1.23456789, "1.235"],
    [3.14e-7, "3.14e-7"],
    [-1234.5678, "-1,235"],
  ])("%s reads %s", (value, words) => {
    expect(number(value)).toBe(words);
  });

  test("a value that was not measured is a dash, and zero is zero", () => {
    expect(count(null)).toBe("–");
    expect(count(0)).toBe("0");
    expect(percent(null)).toBe("–");
    expect(duration(undefined)).toBe("–");
  });

  test.each([
    [0.000004, "4 µs"],
    [0.0042, "4.2 ms"],
    [4, "4.0 s"],
    [42.4, "42 s"],
    [200, "3 min 20 s"],
    [7500, "2 h 5 min"],
    [273_600, "3 d 4 h"],
  ])("%s seconds read %s", (seconds, words) => {
    expect(duration(seconds)).toBe(words);
  });

  test("bytes, percentages and short forms have their units", () => {
    expect(bytes(512)).toBe("512 B");
    expect(bytes(67_108_864)).toBe("64 MiB");
    expect(percent(0.4137)).toBe("41 %");
    expect(percent(0.013)).toBe("1.3 %");
    expect(compact(51_200)).toBe("51.2k");
    expect(compact(3_400_000)).toBe("3.4M");
    expect(withUnit(0.021, "s")).toBe("21 ms");
    expect(withUnit(812.4, "requests/s")).toBe("812.4 requests/s");
  });
});
