import { getRun } from "@/shared/api/getRun";
import { useApi } from "@/shared/api/useApi";
import { useLive } from "@/shared/live/store";

const EVERY_S = 5;

/** On the page of a run that is over: what its directory lacks, and where the run has its page if it was resumed. */
export function EndedNotice() {
  const ended = useLive((state) => state.ended);
  const run = useApi("ended run", getRun, { everyS: EVERY_S, enabled: ended !== undefined }).data ?? undefined;
  if (ended === undefined) return null;
  const livePage = run?.live_page ?? undefined;
  if (livePage === undefined && ended.missing.length === 0) return null;
  return (
    <div className="ended-notice" role="status">
      {livePage !== undefined && (
        <p>
          This run was resumed. This page shows it as it was before
          {livePage === "" ? "." : <>; <a href={livePage}>its live page</a> shows it now.</>}
        </p>
      )}
      {ended.missing.length > 0 && <p>Missing: {ended.missing.join("; ")}.</p>}
    </div>
  );
}
