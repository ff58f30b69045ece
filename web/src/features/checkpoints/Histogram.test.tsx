import { fireEvent, render, screen } from "@testing-library/react";
import { beforeEach, expect, test, vi } from "vitest";
import { PADDING } from "@/shared/chart/axes";
import { Histogram } from "./Histogram";

const WIDTH = 400;
vi.mock("@/shared/ui/useSize", () => ({ useSize: () => ({ width: WIDTH, height: 190 }) }));

const filled: { colour: string; height: number }[] = [];

/** A context that notes the rectangles; the axes need the width of a text only. */
function noting(): CanvasRenderingContext2D {
  const state: Record<string, unknown> = { fillStyle: "" };
  return new Proxy(state, {
    get: (_, name) => {
      if (name === "fillRect") {
        return (_x: number, _y: number, _width: number, height: number) =>
          filled.push({ colour: String(state["fillStyle"]), height });
      }
      if (name === "measureText") return () => ({ width: 20 });
      return name in state ? state[String(name)] : () => undefined;
    },
    set: (_, name, value) => {
      state[String(name)] = value;
      return true;
    },
  }) as unknown as CanvasRenderingContext2D;
}

beforeEach(() => {
  filled.length = 0;
  vi.spyOn(HTMLCanvasElement.prototype, "getContext").mockReturnValue(noting() as never);
});

const BARS = [{ label: "elements", colour: "--series-1" as const, counts: [1, 4, 2] }];

test("the heights of the bars are in proportion to the counts", () => {
  render(<Histogram label="Distribution" edges={[0, 1, 2, 3]} bars={BARS} isLog={false} />);

  const heights = filled.slice(-3).map((each) => each.height);
  expect(heights[1]).toBeCloseTo(4 * (heights[0] ?? 0));
  expect(heights[2]).toBeCloseTo(2 * (heights[0] ?? 0));
});

test("pointing at a bin shows its range, its count and its share", () => {
  render(<Histogram label="Distribution" edges={[0, 1, 2, 3]} bars={BARS} isLog={false} />);
  const canvas = screen.getByRole("img", { name: "Distribution" }).querySelector("canvas") as HTMLCanvasElement;
  expect(screen.getByText("3 bins; point at one to read it")).toBeTruthy();

  fireEvent.pointerMove(canvas, { clientX: PADDING.left + (WIDTH - PADDING.left - PADDING.right) / 2, clientY: 50 });
  expect(screen.getByText("1 to 2")).toBeTruthy();
  expect(screen.getByText(/elements/).textContent).toContain("4 (57 %)");

  fireEvent.pointerLeave(canvas);
  expect(screen.getByText("3 bins; point at one to read it")).toBeTruthy();
});
