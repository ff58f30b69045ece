import { useMemo } from "react";
import { Link } from "wouter";
import { clock } from "@/shared/format/times";
import { useNewest } from "@/shared/journal/useNewest";
import { Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { useQuery } from "@/shared/url/useQuery";

const NUM_SHOWN = 8;

/** The newest entries of the journal for a job. */
export function RecentEvents({ job }: { job: string }) {
  const filter = useMemo(() => ({ job, kind: "", worker: "" }), [job]);
  const { events, isLoading, error, reload } = useNewest(filter, NUM_SHOWN);
  const { href } = useQuery();
  return (
    <Panel title="Latest events" actions={<Link href={href("/events")}>All events</Link>}>
      {error !== undefined && <Failure error={error} onRetry={reload} />}
      {events.length === 0 && isLoading && <Loading rows={3} label="Loading the events" />}
      {events.length === 0 && !isLoading && error === undefined && <p className="muted">Nothing has happened yet.</p>}
      <ol className="recent">
        {events.slice(0, NUM_SHOWN).map((event) => (
          <li key={event.seq}>
            <Link href={href("/events", { at: event.seq.toString() })} className="num">
              <time dateTime={event.at}>{clock(event.at_s)}</time>
            </Link>
            <span>{event.words}</span>
          </li>
        ))}
      </ol>
    </Panel>
  );
}
