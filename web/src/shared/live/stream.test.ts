import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { LiveEvents } from "@/shared/api/types";
import { type Connection, openStream, pauseS } from "./stream";

class FakeSource extends EventTarget {
  onerror: (() => void) | null = null;
  closed = false;
  readonly url: string;
  constructor(url: string) {
    super();
    this.url = url;
    opened.push(this);
  }
  close(): void {
    this.closed = true;
  }
  say(name: string, data: unknown, lastEventId: string): void {
    this.dispatchEvent(new MessageEvent(name, { data: JSON.stringify(data), lastEventId }));
  }
}

let opened: FakeSource[] = [];
const states: Connection[] = [];
const got: [string, unknown][] = [];
let close: () => void = () => undefined;

beforeEach(() => {
  vi.useFakeTimers();
  opened = [];
  states.length = 0;
  got.length = 0;
  close = openStream({
    cursor: "a-1",
    on: (name, data: LiveEvents[keyof LiveEvents]) => got.push([name, data]),
    onConnection: (state) => states.push(state),
    open: (url) => new FakeSource(url) as unknown as EventSource,
  });
});

afterEach(() => {
  close();
  vi.useRealTimers();
});

test("the stream starts at the cursor of the overview", () => {
  expect(opened[0]?.url).toBe("/api/live?cursor=a-1");
  opened[0]?.say("hello", { cursor: "a-1" }, "a-1");
  expect(states).toEqual(["connecting", "live"]);
});

test("after an error it continues at the last cursor", () => {
  opened[0]?.say("hello", {}, "a-1");
  opened[0]?.say("gone", { job_id: "x" }, "a-7");
  opened[0]?.onerror?.();
  expect(opened[0]?.closed).toBe(true);
  expect(states.at(-1)).toBe("reconnecting");
  vi.advanceTimersByTime(500);
  expect(opened[1]?.url).toBe("/api/live?cursor=a-7");
  opened[1]?.say("gone", { job_id: "y" }, "a-8");
  expect(states.at(-1)).toBe("live");
  expect(got.at(-1)).toEqual(["gone", { job_id: "y" }]);
});

test("a connection that is silent for 20 s is opened again", () => {
  opened[0]?.say("hello", {}, "a-1");
  vi.advanceTimersByTime(20_000);
  expect(states.at(-1)).toBe("reconnecting");
  vi.advanceTimersByTime(500);
  expect(opened).toHaveLength(2);
});

test("the pauses grow from half a second to 15 s", () => {
  expect([1, 2, 3, 10].map(pauseS)).toEqual([0.5, 1, 2, 15]);
});

test("a closed stream stays closed", () => {
  close();
  opened[0]?.onerror?.();
  vi.advanceTimersByTime(60_000);
  expect(opened).toHaveLength(1);
});
