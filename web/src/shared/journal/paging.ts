/** The journal is read forwards, but people read it from the newest event. These functions walk backwards through it. */
import type { EventLine, EventPage } from "@/shared/api/types";

/** Reads events after an entry, oldest first. */
export type Read = (after: number, limit: number) => Promise<EventPage>;

/** The most events of one answer. */
const MAX_LIMIT = 1_000;
/** The most entries that one request scans. */
const MAX_SPAN = 10_000;

/** Returns the number of the newest entry at or after `known`; doubles its steps, then halves them. */
export async function findEnd(read: Read, known: number): Promise<number> {
  const next = async (after: number): Promise<number> => (await read(after, 1)).items[0]?.seq ?? 0;
  let low = known;
  let step = 256;
  let high: number | undefined;
  while (high === undefined) {
    const found = await next(low + step);
    if (found === 0) high = low + step;
    else {
      low = found;
      step *= 4;
    }
  }
  // Invariant: an entry with number `low` exists (or low is `known`), and none above `high`.
  while (high - low > MAX_LIMIT) {
    const middle = Math.floor((low + high) / 2);
    const found = await next(middle);
    if (found === 0) high = middle;
    else low = found;
  }
  const rest = await read(low, MAX_LIMIT);
  return Math.max(low, rest.items.at(-1)?.seq ?? 0);
}

/** Returns the number of the newest entry at or before a moment, by halving; 0 if the journal begins after it. */
export async function findMoment(read: Read, atS: number): Promise<number> {
  let low = 0;
  let high = (await findEnd(read, 0)) + 1;
  // Invariant: entry `low` is not after the moment, and none from `high` on is before it.
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    const found = (await read(middle - 1, 1)).items[0];
    if (found === undefined || found.seq >= high || found.at_s > atS) high = middle;
    else low = found.seq;
  }
  return low;
}

export interface Older {
  /** Newest first. */
  items: EventLine[];
  /** Everything before this entry is not read yet; 0 at the beginning of the journal. */
  before: number;
}

/** Returns at least `wanted` events before an entry, newest first, unless the journal begins. */
export async function readBack(read: Read, before: number, wanted: number): Promise<Older> {
  const items: EventLine[] = [];
  let end = before;
  let span = Math.max(wanted, 1);
  while (items.length < wanted && end > 1) {
    const start = Math.max(end - 1 - span, 0);
    const found: EventLine[] = [];
    for (let after = start; ; ) {
      const page = await read(after, MAX_LIMIT);
      found.push(...page.items.filter((event) => event.seq < end));
      const isPast = page.next_after >= end - 1 || !page.more;
      if (isPast || page.next_after <= after) break;
      after = page.next_after;
    }
    items.push(...found.reverse());
    end = start + 1;
    span = Math.min(span * 4, MAX_SPAN);
  }
  return { items, before: end <= 1 ? 0 : end };
}
