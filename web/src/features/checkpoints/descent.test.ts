import { expect, test } from "vitest";
import type { CheckpointLine, StoredCheckpoint } from "@/shared/api/types";
import { rows } from "./descent";

const line = (id: string): CheckpointLine => ({
  ...{ checkpoint_id: id, type: "FULL", step: 40, epoch: 0, size_bytes: 1, generation: 1, num_ranks: 1 },
  committed_at_s: 0,
  attempt: 0,
  resumed_by: [],
});

test("a checkpoint that retention has deleted keeps its line", () => {
  const found = rows([line("a"), line("b")], [{ id: "b", parent: "a" } as StoredCheckpoint]);
  expect(found.map((each) => each.stored?.parent)).toEqual([undefined, "a"]);
});
