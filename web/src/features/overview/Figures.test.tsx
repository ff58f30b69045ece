import { render, screen } from "@testing-library/react";
import { afterEach, expect, test } from "vitest";
import type { JobSummary } from "@/shared/api/types";
import { EMPTY, useLive } from "@/shared/live/store";
import { EndedFigures } from "./EndedFigures";
import { Figures } from "./Figures";
import { JobsTable } from "./JobsTable";

const JOB: JobSummary = {
  ...{ job_id: "flights", state: "training", generation: 3, reason: "rank-1 joined", num_workers: 2, num_servers: 0 },
  ...{ num_suspects: 0, workers_by_state: { TRAINING: 2 }, step: 1_840, epoch: 1, attempt: 1, data_fraction: 0.41 },
  ...{ steps_per_s: 12.5, rows_per_s: 51_200, checkpoint_id: "c9", checkpoint_step: 1_750, checkpoint_age_s: 7.2 },
  health: { level: "ok", line: "all 2 workers report", findings: [], num_findings: 0 },
};

function figure(label: string): string {
  const term = screen.getAllByRole("term").find((each) => each.textContent === label);
  return term?.nextElementSibling?.textContent ?? "";
}

afterEach(() => {
  useLive.setState(EMPTY, true);
});

test("each figure of a job has its unit", () => {
  render(<Figures job={JOB} />);

  expect(figure("Step")).toBe("1,840 trainingepoch 141 % of data");
  expect(figure("Step rate")).toBe("12.5 steps/smean over ranks");
  expect(figure("Row rate")).toBe("51.2k rows/ssum over ranks");
  expect(figure("Last checkpoint")).toBe("7.2 s agoat step 1,750");
});

test("a figure that was not measured is a dash", () => {
  render(<Figures job={{ ...JOB, steps_per_s: null, rows_per_s: null, checkpoint_age_s: null, checkpoint_step: null }} />);

  expect(figure("Step rate")).toBe("– steps/smean over ranks");
  expect(figure("Row rate")).toBe("– rows/ssum over ranks");
  expect(figure("Last checkpoint")).toBe("– none committed");
});

test("workers that lost their connection lead to the list of them", () => {
  render(<Figures job={{ ...JOB, num_suspects: 1 }} />);
  expect(screen.getByRole("link", { name: "1 lost connection" }).getAttribute("href")).toBe("/workers?suspect=true");
});

test("the table of jobs marks the chosen one and tells how many are left out", () => {
  useLive.setState({ ...EMPTY, numJobs: 700 }, true);
  render(<JobsTable jobs={[JOB, { ...JOB, job_id: "other" }]} chosen="other" />);

  expect(screen.getByText("2 of 700")).toBeTruthy();
  expect(screen.getByRole("row", { current: true }).textContent).toContain("other");
  expect(screen.getByRole("link", { name: "flights" }).getAttribute("href")).toBe("/?job=flights");
});

test("a run that is over has the figures of its end", () => {
  const ended = {
    ...{ state: "failed", reason: "rank 1 failed 4 times", began_at_s: 1_000, ended_at_s: 1_090, step: 1_840 },
    ...{ num_restarts: 3, log_ranks: [0, 1], missing: [] },
  };
  render(<EndedFigures ended={ended} job={JOB} />);

  expect(figure("End")).toBe("failed rank 1 failed 4 times");
  expect(figure("Last step")).toBe("1,840 41 % of data");
  expect(figure("Restarts")).toBe("3 3 recoveries");
  expect(figure("Last checkpoint")).toBe("step 1,750 open it");
});
