import { expect, test } from "vitest";
import type { EventLine } from "@/shared/api/types";
import { findEnd, findMoment, type Read, readBack } from "./paging";

/** A journal whose entries may have gaps in their numbers, as other jobs' events leave them. */
function journal(seqs: number[], matches: (seq: number) => boolean = () => true): { read: Read; calls: () => number } {
  let calls = 0;
  const read: Read = (after, limit) => {
    calls += 1;
    const rest = seqs.filter((seq) => seq > after);
    const scanned = rest.slice(0, 10_000);
    const found = scanned.filter(matches).slice(0, limit);
    const items = found.map((seq) => ({ seq, at_s: seq, words: `event ${seq}` }) as EventLine);
    const last = found.length === limit ? (found.at(-1) ?? after) : (scanned.at(-1) ?? after);
    return Promise.resolve({ items, limit, after, next_after: last, more: (rest.at(-1) ?? after) > last });
  };
  return { read, calls: () => calls };
}

const range = (num: number): number[] => Array.from({ length: num }, (_, index) => index + 1);

test.each([0, 1, 256, 1_000, 1_001, 100_000])("the end of a journal of %i entries is found", async (num) => {
  const { read, calls } = journal(range(num));
  expect(await findEnd(read, 0)).toBe(num);
  expect(calls()).toBeLessThan(30);
});

test("the end is found from an entry that is known", async () => {
  const { read, calls } = journal(range(100_000));
  expect(await findEnd(read, 99_990)).toBe(100_000);
  expect(calls()).toBeLessThanOrEqual(3);
});

test("a page has the newest events first and continues without a gap or a repetition", async () => {
  const { read } = journal(range(1_000));
  const first = await readBack(read, 1_001, 100);
  expect([first.items[0]?.seq, first.items.at(-1)?.seq]).toEqual([1_000, 901]);
  const second = await readBack(read, first.before, 100);
  expect([second.items[0]?.seq, second.items.at(-1)?.seq]).toEqual([900, 801]);
});

test("rare events are found far back, and the beginning ends the walk", async () => {
  const { read, calls } = journal(range(50_000), (seq) => seq === 7 || seq === 49_999);
  const found = await readBack(read, 50_001, 100);
  expect(found.items.map((event) => event.seq)).toEqual([49_999, 7]);
  expect(found.before).toBe(0);
  expect(calls()).toBeLessThan(20);
});

test.each([
  [0.5, 0],
  [1, 1],
  [2_999.5, 2_997],
  [5_000, 4_998],
  [9_000, 4_998],
])("the newest entry up to moment %d of a journal with gaps is %d", async (atS, seq) => {
  const { read, calls } = journal([1, ...range(1_666).map((each) => each * 3)]);
  expect(await findMoment(read, atS)).toBe(seq);
  expect(calls()).toBeLessThan(40);
});

test("a moment among 100,000 entries needs few requests", async () => {
  const { read, calls } = journal(range(100_000));
  expect(await findMoment(read, 67_890.25)).toBe(67_890);
  expect(calls()).toBeLessThan(50);
});
