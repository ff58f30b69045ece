import { cleanup, render, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { RunInfo } from "@/shared/api/types";
import { RunCommands } from "./RunCommands";

const RUN: RunInfo = { name: "job", min_workers: 1, max_workers: 4, may_command: true };
const sent = vi.fn<typeof fetch>();

beforeEach(() => {
  sent.mockReset();
  sent.mockResolvedValue(new Response(null, { status: 204 }));
  vi.stubGlobal("fetch", sent);
});

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

function bodies(): unknown[] {
  return sent.mock.calls.map(([path, options]) => [path, JSON.parse(String(options?.body))]);
}

test("a stop is sent only after it is confirmed", async () => {
  render(<RunCommands run={RUN} numWorkers={2} />);
  await userEvent.click(screen.getByText("Stop…"));
  await userEvent.click(screen.getByText("Cancel"));
  expect(sent).not.toHaveBeenCalled();

  await userEvent.click(screen.getByText("Stop…"));
  await userEvent.click(screen.getByText("Save and stop"));
  expect(bodies()).toEqual([["/api/run/stop", { is_now: false }]]);
  expect(screen.queryByText("Save and stop")).toBeNull();
});

test("a refused command shows the server's reason and stays open", async () => {
  const body = { error: { kind: "InvalidArgument", message: "the run is about to end", field: "workers" } };
  sent.mockResolvedValue(new Response(JSON.stringify(body), { status: 422 }));
  render(<RunCommands run={RUN} numWorkers={2} />);
  await userEvent.click(screen.getByText("Scale…"));
  await userEvent.click(screen.getByText("Continue with 2 workers"));
  expect(await screen.findByText("the run is about to end")).toBeTruthy();
  expect(bodies()).toEqual([["/api/run/scale", { workers: 2 }]]);
});

test("a run of a fixed size has no scale command", () => {
  render(<RunCommands run={{ ...RUN, min_workers: 2, max_workers: 2 }} numWorkers={2} />);
  expect(screen.queryByText("Scale…")).toBeNull();
});
