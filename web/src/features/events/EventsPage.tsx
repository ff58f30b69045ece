import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef } from "react";
import type { EventLine } from "@/shared/api/types";
import { count, duration } from "@/shared/format/numbers";
import { clock, day, moment } from "@/shared/format/times";
import { KINDS, kindOf } from "@/shared/journal/kinds";
import { useNewest } from "@/shared/journal/useNewest";
import { useJob } from "@/shared/live/useJob";
import { Button } from "@/shared/ui/Button";
import { Select } from "@/shared/ui/Choice";
import { Icon } from "@/shared/ui/Icon";
import { Command, Empty, Failure, Loading } from "@/shared/ui/Notice";
import { SearchField } from "@/shared/ui/SearchField";
import { useQuery } from "@/shared/url/useQuery";
import "./events.css";

const PAGE_SIZE = 200;
const ROW_PX = 46;
/** Older events are loaded when this many rows are left below. */
const AHEAD = 30;

export default function EventsPage() {
  const { get, set } = useQuery();
  const { jobId } = useJob();
  const kind = get("kind");
  const worker = get("worker");
  const seq = /^\d+$/.test(get("at")) ? Number(get("at")) : undefined;
  const atS = /^\d+(\.\d+)?$/.test(get("time")) ? Number(get("time")) : undefined;
  const isMoment = seq !== undefined || atS !== undefined;
  const job = get("all") === "true" ? "" : jobId;
  const filter = useMemo(() => ({ job, kind, worker }), [job, kind, worker]);
  const newest = useNewest(filter, PAGE_SIZE, { seq, atS });
  const { events, isLoading, error, reload } = newest;
  const isFiltered = kind !== "" || worker !== "";

  return (
    <div className="page events-page">
      <div className="page-head">
        <div>
          <h1>Events</h1>
          <p className="lead">
            {!isMoment
              ? `What happened to ${job === "" ? "all jobs" : job}, and why. Newest first.`
              : `Around ${seq === undefined ? moment(atS ?? 0) : `event ${count(seq)}`}. New events are not added while you look at a moment.`}
          </p>
        </div>
        <div className="page-tools">
          {isMoment && (
            <Button
              icon="close"
              onClick={() => {
                set({ at: null, time: null });
              }}
            >
              Back to the newest
            </Button>
          )}
          <SearchField
            label="Worker"
            placeholder="Worker, such as worker-3"
            value={worker}
            onChange={(value) => {
              set({ worker: value });
            }}
          />
          <Select
            label="Kind of event"
            value={kind}
            options={[
              { value: "", label: "Every kind" },
              ...Object.entries(KINDS).map(([value, { label }]) => ({ value, label })),
            ]}
            onChange={(value) => {
              set({ kind: value });
            }}
          />
          <Button
            aria-pressed={job === ""}
            onClick={() => {
              set({ all: job === "" ? null : "true" });
            }}
          >
            All jobs
          </Button>
        </div>
      </div>
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      <section className="panel" aria-label="Events">
        {events.length > 0 && (
          <Story
            newest={newest}
            showJob={job === ""}
            onChoose={(chosen) => {
              set({ at: chosen.toString(), time: null }, { push: true });
            }}
          />
        )}
        {events.length === 0 && isLoading && <Loading rows={8} label="Loading the events" />}
        {events.length === 0 && !isLoading && error === undefined && isFiltered && (
          <Empty icon="search" title="No event matches the filters">
            <Button
              onClick={() => {
                set({ kind: null, worker: null });
              }}
            >
              Clear the filters
            </Button>
          </Empty>
        )}
        {events.length === 0 && !isLoading && error === undefined && !isFiltered && (
          <Empty icon="events" title="The journal is empty">
            <p>Every change of a job is recorded here with its reason. Start a run:</p>
            <Command>strata run --workers 2 train.py</Command>
          </Empty>
        )}
      </section>
    </div>
  );
}

interface StoryProps {
  newest: ReturnType<typeof useNewest>;
  showJob: boolean;
  onChoose: (seq: number) => void;
}

/** The events as rows; only those in view are in the document. */
function Story({ newest, showJob, onChoose }: StoryProps) {
  const { events, at, hasOlder, isLoading, loadOlder } = newest;
  const scroll = useRef<HTMLDivElement>(null);
  const rows = useVirtualizer({
    count: events.length,
    getScrollElement: () => scroll.current,
    estimateSize: () => ROW_PX,
    getItemKey: (index) => events[index]?.seq ?? index,
    overscan: 12,
  });
  const items = rows.getVirtualItems();
  const lastShown = items.at(-1)?.index ?? 0;
  useEffect(() => {
    if (hasOlder && !isLoading && lastShown > events.length - AHEAD) loadOlder();
  }, [hasOlder, isLoading, lastShown, events.length, loadOlder]);

  // A filter may hide the entry itself; the one before it is then the moment.
  const current = at === undefined ? -1 : events.findIndex((event) => event.seq <= at);
  const hasJumped = useRef<number>(undefined);
  useEffect(() => {
    if (current < 0 || hasJumped.current === at) return;
    hasJumped.current = at;
    rows.scrollToIndex(current, { align: "center" });
  }, [at, current, rows]);

  return (
    // eslint-disable-next-line jsx-a11y/no-noninteractive-tabindex -- a region that scrolls must be reachable
    <div className="events-scroll" ref={scroll} role="region" aria-label="Events, newest first" tabIndex={0}>
      <ol className="events-body" style={{ height: rows.getTotalSize() }}>
        {items.map((item) => {
          const event = events[item.index];
          if (event === undefined) return null;
          return (
            <li
              key={event.seq}
              ref={rows.measureElement}
              data-index={item.index}
              aria-current={item.index === current ? "true" : undefined}
              style={{ transform: `translateY(${item.start}px)` }}
            >
              <Row event={event} older={events[item.index + 1]} {...{ showJob, onChoose }} />
            </li>
          );
        })}
      </ol>
      {hasOlder && (
        <div className="events-more">
          <Button onClick={loadOlder} disabled={isLoading}>
            {isLoading ? "Loading…" : "Load older events"}
          </Button>
        </div>
      )}
      {!hasOlder && !isLoading && <p className="events-more muted">The journal begins here.</p>}
    </div>
  );
}

interface RowProps {
  event: EventLine;
  older: EventLine | undefined;
  showJob: boolean;
  onChoose: (seq: number) => void;
}

/** A pause before an event that is worth a word, in seconds. */
const PAUSE_S = 10;

function Row({ event, older, showJob, onChoose }: RowProps) {
  const kind = kindOf(event.kind);
  const isNewDay = older === undefined || day(older.at_s) !== day(event.at_s);
  const pause = older === undefined ? 0 : event.at_s - older.at_s;
  return (
    <div className="event">
      <button
        type="button"
        className="event-time num"
        title={`${event.at} · link to this moment`}
        onClick={() => {
          onChoose(event.seq);
        }}
      >
        <time dateTime={event.at}>{clock(event.at_s)}</time>
        {isNewDay && <span className="event-day">{day(event.at_s)}</span>}
      </button>
      <span className={`event-icon ${kind.look}`}>
        <Icon name={kind.icon} size={14} />
      </span>
      <div className="event-words">
        <p>{event.words}</p>
        <p className="muted">
          {kind.label}
          {showJob && ` · ${event.job_id}`}
          {event.generation !== null && ` · generation ${event.generation}`}
          {pause > PAUSE_S && ` · ${duration(pause)} after the event before`}
        </p>
      </div>
      <span className="event-seq muted num">#{event.seq}</span>
    </div>
  );
}
