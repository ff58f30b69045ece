import { cleanup, render, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, expect, test, vi } from "vitest";
import { LogPanel } from "./LogPanel";

const LOG = { rank: 1, attempt: 2, attempts: [0, 2], lines: ["step 1", "<b>step 2</b>"] };
const sent = vi.fn<typeof fetch>();

function serve(answer: () => Response): void {
  sent.mockReset();
  sent.mockImplementation((_, options) =>
    Promise.resolve(options?.method === "POST" ? answer() : new Response(JSON.stringify(LOG))),
  );
  vi.stubGlobal("fetch", sent);
}

function orders(): unknown[] {
  const posts = sent.mock.calls.filter(([, options]) => options?.method === "POST");
  return posts.map(([path, options]) => [path, JSON.parse(String(options?.body))]);
}

afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
});

test("the stacks of a worker are asked for, and its log is read again", async () => {
  serve(() => new Response(null, { status: 204 }));
  const { container } = render(<LogPanel rank={1} mayCommand onClose={() => undefined} />);
  await screen.findByText("attempt 2, last 2 lines");
  expect(container.querySelector("pre")?.textContent).toBe("step 1\n<b>step 2</b>");
  const numRead = sent.mock.calls.length;

  await userEvent.click(screen.getByText("Dump stacks"));
  expect(orders()).toEqual([["/api/run/stacks", { rank: 1 }]]);
  await vi.waitFor(() => {
    expect(sent.mock.calls.length).toBeGreaterThan(numRead + 1);
  });
});

test("a worker that has ended shows the server's reason", async () => {
  const error = { kind: "InvalidArgument", message: "rank=1 does not run now", field: "rank" };
  serve(() => new Response(JSON.stringify({ error }), { status: 422 }));
  render(<LogPanel rank={1} mayCommand onClose={() => undefined} />);
  await userEvent.click(await screen.findByText("Dump stacks"));
  expect(await screen.findByText("rank=1 does not run now")).toBeTruthy();
});

test("a reader sees the log without the command", async () => {
  serve(() => new Response(null, { status: 204 }));
  render(<LogPanel rank={1} mayCommand={false} onClose={() => undefined} />);
  await screen.findByText("attempt 2, last 2 lines");
  expect(screen.queryByText("Dump stacks")).toBeNull();
});
