import { cleanup, render, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { JobSummary, SeriesInfo } from "@/shared/api/types";
import { EMPTY, useLive } from "@/shared/live/store";
import { Charts } from "./Charts";
import { comparedIn } from "./useCompared";

const NOW_S = 10_000;
const BEGAN_S: Record<string, number> = { first: 9_000, second: 9_800 };
const LAST: Record<string, number> = { first: 0.25, second: 0.5, "": 3 };
const asked: URLSearchParams[] = [];

function answer(input: RequestInfo | URL): Response {
  const url = new URL(String(input), "http://host");
  const job = url.searchParams.get("job") ?? "";
  if (url.pathname === "/api/series") {
    const info = { job_id: job, name: "metric:loss", unit: "", first_at_s: BEGAN_S[job], last_at_s: NOW_S } as SeriesInfo;
    return new Response(JSON.stringify({ items: [info], total: 1, limit: 200, offset: 0, next_offset: null }));
  }
  asked.push(url.searchParams);
  const series = url.searchParams.getAll("name").map((name) => {
    const column = [LAST[job], LAST[job]];
    return { name, unit: "", interval_s: 1, t: [NOW_S - 2, NOW_S - 1], min: column, mean: column, max: column };
  });
  return new Response(JSON.stringify({ job_id: job, cursor: "c", series }));
}

beforeEach(() => {
  asked.length = 0;
  vi.stubGlobal("fetch", (input: RequestInfo | URL) => Promise.resolve(answer(input)));
  vi.spyOn(Date, "now").mockReturnValue(NOW_S * 1_000);
  window.history.replaceState(null, "", "/?job=second");
  const jobs = Object.keys(BEGAN_S).map((job_id) => ({ job_id }) as JobSummary);
  useLive.setState({ ...EMPTY, atS: NOW_S, jobs }, true);
});

afterEach(() => {
  cleanup();
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
  window.history.replaceState(null, "", "/");
  useLive.setState(EMPTY, true);
});

test("a job that began earlier is drawn from the beginning of the chosen one", async () => {
  render(<Charts job="second" />);
  const chart = await screen.findByRole("article", { name: "loss" });
  expect(within(chart).queryByRole("list")).toBeNull();
  await userEvent.selectOptions(screen.getByLabelText("Compare with another job"), "first");

  const legend = await within(chart).findByRole("list");
  expect(within(legend).getAllByRole("listitem").map((each) => each.textContent)).toEqual(["second 0.5", "first 0.25"]);
  const [own, other] = ["second", "first"].map((job) => asked.filter((each) => each.get("job") === job).at(-1));
  expect(Number(own?.get("since_s")) - Number(other?.get("since_s"))).toBe(800);
  expect(window.location.search).toBe("?job=second&with=first");
});

test("a link with a comparison shows it, and it can be ended", async () => {
  window.history.replaceState(null, "", "/?job=second&with=first");
  render(<Charts job="second" />);
  const chart = await screen.findByRole("article", { name: "loss" });
  await within(chart).findByText("first");
  await userEvent.click(screen.getByRole("button", { name: "first: stop comparing" }));

  expect(window.location.search).toBe("?job=second");
  expect(within(chart).queryByText("first")).toBeNull();
});

test("an address names at most three other jobs, each once", () => {
  expect(comparedIn("b,a,,b,c,d,e", "a")).toEqual(["b", "c", "d"]);
  expect(comparedIn("", "a")).toEqual([]);
});
