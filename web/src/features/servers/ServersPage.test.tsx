import { render, screen, within } from "@testing-library/react";
import { afterEach, expect, test, vi } from "vitest";
import type { JobServers } from "@/shared/api/types";
import ServersPage from "./ServersPage";

const SERVER: JobServers["servers"]["items"][number] = {
  ...{ number: 0, worker_id: "server-0", step: 9, rows: 26_093, bytes: 1 << 20, evicted: 3, pulls_per_s: 137.5 },
  ...{ pushes_per_s: 12, staleness: 2, hit_rate: null, silent_s: 0.5, suspect: false },
};

function serve(servers: JobServers["servers"]["items"]): void {
  window.history.replaceState(null, "", "/servers?job=ctr");
  const page = { items: servers, total: servers.length, limit: 50, offset: 0, next_offset: null };
  const found: JobServers = { job_id: "ctr", total: null, servers: page };
  const history = { job_id: "ctr", cursor: "", series: [] };
  vi.stubGlobal("fetch", (path: string) =>
    Promise.resolve(new Response(JSON.stringify(path.startsWith("/api/servers") ? found : history))),
  );
}

afterEach(() => {
  vi.unstubAllGlobals();
});

test("what a server has not measured is a dash, not a zero", async () => {
  serve([SERVER]);
  render(<ServersPage />);

  const row = await screen.findByRole("row", { name: /server-0/ });
  const cells = within(row).getAllByRole("cell").map((each) => each.textContent);
  expect(cells).toEqual(["0", "9", "26,093", "1 MiB", "137.5", "12", "2", "–", "3", "500 ms ago", "server-0"]);
});

test("a server that lost its connection is marked in words", async () => {
  serve([{ ...SERVER, suspect: true }]);
  render(<ServersPage />);
  expect(await screen.findByRole("cell", { name: "lost connection" })).toBeTruthy();
});

test("a job without servers names what would start them", async () => {
  serve([]);
  render(<ServersPage />);
  expect(await screen.findByRole("heading", { name: "No parameter servers" })).toBeTruthy();
});
