import { render, screen, within } from "@testing-library/react";
import { afterEach, expect, test, vi } from "vitest";
import type { Goodput, GoodputEntry } from "@/shared/api/types";
import GoodputPage from "./GoodputPage";

const RUN: GoodputEntry = {
  ...{ attempt: null, began_at_s: 0, ended_at_s: 100, num_ranks: 2, total_s: 200, goodput: 0.75 },
  parts_s: { computing: 150, repeated: 10, data: 4, checkpoint: 6, barriers: 0, starting: 20, recovering: 10, unknown: 0 },
};

function serve(answer: Partial<Goodput>): void {
  window.history.replaceState(null, "", "/goodput?job=flights");
  const found: Goodput = { job_id: "flights", at_s: 100, run: null, attempts: [], num_attempts: 0, ...answer };
  vi.stubGlobal("fetch", () => Promise.resolve(new Response(JSON.stringify(found))));
}

afterEach(() => {
  vi.unstubAllGlobals();
});

test("the ledger shows each part with its share and its time", async () => {
  serve({ run: RUN, attempts: [{ ...RUN, attempt: 0 }], num_attempts: 1 });
  render(<GoodputPage />);

  expect(await screen.findByRole("heading", { name: "75 % goodput" })).toBeTruthy();
  const cells = (name: RegExp): (string | null)[] =>
    within(screen.getByRole("row", { name })).getAllByRole("cell").slice(1, 3).map((each) => each.textContent);
  expect(cells(/Starting/)).toEqual(["10 %", "20 s"]);
  expect(cells(/Barriers/)).toEqual(["0 %", "0 s"]);
  expect(cells(/Total/)).toEqual(["100 %", "3 min 20 s"]);
});

test("the bar is described in words, without the parts that took no time", async () => {
  serve({ run: RUN, attempts: [{ ...RUN, attempt: 0 }], num_attempts: 1 });
  render(<GoodputPage />);

  const words =
    "Run: Computing 75 %, Steps computed twice 5.0 %, Waiting for data 2.0 %, Checkpoint stall 3.0 %, Starting 10 %, Recovering 5.0 %";
  expect(await screen.findByRole("img", { name: words })).toBeTruthy();
});

test("only the newest attempts have a bar, and the page tells how many there are", async () => {
  const attempts = Array.from({ length: 12 }, (_, attempt) => ({ ...RUN, attempt }));
  serve({ run: RUN, attempts, num_attempts: 40 });
  render(<GoodputPage />);

  expect(await screen.findByText(/newest 8 of 40/)).toBeTruthy();
  expect(screen.getAllByRole("img")).toHaveLength(1 + 8);
});

test("a job without a ledger names the command that starts one", async () => {
  serve({});
  render(<GoodputPage />);
  expect(await screen.findByText("strata run --workers 2 train.py")).toBeTruthy();
});
