import { expect, test } from "vitest";
import { titleOf } from "@/shared/chart/series";
import { groups } from "./groups";

test("throughput comes first, then losses, then other metrics by name", () => {
  const names = ["metric:lr", "workers.TRAINING", "metric:val_loss", "checkpoint_age_s", "step", "rows_per_s", "metric:loss", "steps_per_s", "metric:acc"];
  expect(groups(names, titleOf).map((group) => group.key)).toEqual([
    ...["steps_per_s", "rows_per_s", "metric:loss", "metric:val_loss", "metric:acc", "metric:lr", "checkpoint_age_s"],
  ]);
});

test("rows per second have one chart, the sum over ranks", () => {
  expect(groups(["metric:rows_per_s", "rows_per_s"], titleOf).map((group) => group.key)).toEqual(["rows_per_s"]);
});

test("a metric named like one of ours keeps its own chart", () => {
  expect(groups(["metric:step", "step"], titleOf).map((group) => group.title)).toEqual(["step"]);
});
