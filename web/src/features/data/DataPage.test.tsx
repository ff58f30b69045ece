import { render, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { JobData, JobShards, ShardOwner } from "@/shared/api/types";
import DataPage from "./DataPage";

const BASE: JobData = {
  ...{ job_id: "flights", at_s: 100, datasets: [], num_datasets: 0, shards: null },
  ...{ waits: [], num_waits: 0, num_measured: 2, num_ranks: 2 },
};
const OWNER: ShardOwner = { worker_id: "worker-0", rank: 0, num_shards: 60, num_done: 20, num_gained: 5, cells: [1, 1, 0] };
const SHARDS: JobShards = {
  dataset: {
    ...{ dataset_id: "rows", job_id: "flights", num_shards: 120, num_done: 40, total_samples: 1_200_000 },
    ...{ shuffle: true, seed: 7, epoch: 2, complete: false },
  },
  ...{ shards_per_cell: 1, num_waiting: 0, min_per_worker: 60, max_per_worker: 60, mean_per_worker: 60 },
  ...{ min_left: 40, max_left: 40 },
  owners: { items: [OWNER], total: 120, limit: 50, offset: 0, next_offset: 50 },
  last_move: { at_s: 90, generation: 4, num_moved: 30, num_workers: 2, reason: "worker-2 left" },
};
const asked = vi.fn<typeof fetch>();

function serve(answer: Partial<JobData>): void {
  asked.mockImplementation(() => Promise.resolve(new Response(JSON.stringify({ ...BASE, ...answer }))));
}

beforeEach(() => {
  window.history.replaceState(null, "", "/data?job=flights");
  asked.mockReset();
  vi.stubGlobal("fetch", asked);
});

afterEach(() => {
  vi.unstubAllGlobals();
});

test("a rank that waits for data is listed with the reason and the cure", async () => {
  const wait = { worker_id: "rank-1", rank: 1, share: 0.4, cause: "some_ranks", reason: "only rank 1 waits", cure: "compare its host" };
  serve({ waits: [wait as JobData["waits"][number]], num_waits: 1 });
  render(<DataPage />);

  const row = await screen.findByRole("row", { name: /rank-1/ });
  expect(within(row).getByText("40 %")).toBeTruthy();
  expect(within(row).getByText("only rank 1 waits")).toBeTruthy();
  expect(within(row).getByText("compare its host")).toBeTruthy();
});

test("shards are shown by owner with what the last change of membership moved", async () => {
  serve({ datasets: [SHARDS.dataset], num_datasets: 1, shards: SHARDS });
  render(<DataPage />);

  expect(await screen.findByRole("heading", { name: "Shards of rows by owner" })).toBeTruthy();
  expect(screen.getByText(/30 shards of 120 got a new owner/).textContent).toContain("worker-2 left");
  expect(screen.getByRole("img", { name: "20 of 60 shards done" })).toBeTruthy();
  expect(screen.getByText(/\+5 moved/)).toBeTruthy();
});

test("more owners than fit are fetched page by page", async () => {
  serve({ datasets: [SHARDS.dataset], num_datasets: 1, shards: SHARDS });
  render(<DataPage />);
  await userEvent.click(await screen.findByRole("button", { name: "Next" }));

  expect(window.location.search).toContain("owner=50");
  expect(asked.mock.calls.map(([path]) => String(path)).at(-1)).toContain("offset=50");
});

test("a job without a registered dataset is told from one that has measured nothing", async () => {
  serve({ num_measured: 0 });
  render(<DataPage />);

  expect(await screen.findByRole("heading", { name: "This job has no registered dataset" })).toBeTruthy();
  expect(screen.getByText(/^Not measured yet/)).toBeTruthy();
});
