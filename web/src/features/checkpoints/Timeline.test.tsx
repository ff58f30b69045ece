import { render, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { expect, test, vi } from "vitest";
import type { StoredCheckpoint } from "@/shared/api/types";
import { Timeline } from "./Timeline";

vi.mock("@/shared/ui/useSize", () => ({ useSize: () => ({ width: 600, height: 100 }) }));

function saved(step: number, changes: Partial<StoredCheckpoint> = {}): StoredCheckpoint {
  return {
    ...{ id: `step-${step}`, kind: "strata", step, epoch: 0, type: "FULL", created_at_s: step, branch: 0, parent: "" },
    ...{ size_bytes: 1 << 20, full_bytes: 1 << 20, bases: [], children: [], duration_s: null, metadata: {} },
    ...{ model_hash: "", num_ranks: 1, num_tensors: 3, why: "" },
    ...changes,
  } as StoredCheckpoint;
}

const ITEMS = [saved(300, { type: "INCREMENTAL", parent: "step-200", size_bytes: 1 << 10 }), saved(200), saved(100)];

test("each checkpoint is named with its step, type and size, oldest first", () => {
  render(<Timeline items={ITEMS} chosen="step-200" against="" onChoose={() => undefined} />);

  const names = screen.getAllByRole("radio").map((each) => each.getAttribute("aria-label") ?? "");
  expect(names.map((each) => each.split(", ").slice(0, 3).join(", "))).toEqual([
    "step 100, full, 1 MiB",
    "step 200, full, 1 MiB",
    "step 300, incremental, 1 KiB",
  ]);
  expect(screen.getByRole("radio", { checked: true }).getAttribute("aria-label")).toContain("step 200");
});

test("arrow keys choose the neighbour, Shift chooses one to compare with", async () => {
  const chosen = vi.fn();
  render(<Timeline items={ITEMS} chosen="step-200" against="" onChoose={chosen} />);
  screen.getByRole("radio", { checked: true }).focus();
  await userEvent.keyboard("{ArrowRight}{ArrowLeft}{Shift>}{Enter}{/Shift}");

  expect(chosen.mock.calls).toEqual([["step-300", false], ["step-100", false], ["step-200", true]]);
});

test("a delta is linked with its parent only if the parent is kept", () => {
  const { container, rerender } = render(<Timeline items={ITEMS} chosen="" against="" onChoose={() => undefined} />);
  expect(container.querySelectorAll(".timeline-link")).toHaveLength(1);
  rerender(<Timeline items={[ITEMS[0] ?? saved(300), saved(100)]} chosen="" against="" onChoose={() => undefined} />);
  expect(container.querySelectorAll(".timeline-link")).toHaveLength(0);
});
