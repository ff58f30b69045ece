import { moment } from "@/shared/format/times";
import { useLive } from "@/shared/live/store";
import { useNow } from "@/shared/ui/useNow";

/** Whether the figures are live, and when the page tries again if they are not. */
export function ConnectionBadge() {
  const connection = useLive((state) => state.connection);
  const retryAtMs = useLive((state) => state.retryAtMs);
  const ended = useLive((state) => state.ended);
  const now = useNow();
  const waitS = Math.max(Math.ceil(retryAtMs / 1000 - now), 0);
  const words = {
    connecting: "Connecting…",
    live: "Live",
    paused: "Paused",
    reconnecting: waitS > 0 ? `Reconnecting in ${waitS} s` : "Reconnecting…",
  }[connection];
  if (ended !== undefined) {
    return (
      <span className="connection ended" role="status">
        <span className="connection-dot" aria-hidden="true" />
        <span className="connection-words">Ended {moment(ended.ended_at_s)}</span>
      </span>
    );
  }
  return (
    <span className={`connection ${connection}`} role="status">
      <span className="connection-dot" aria-hidden="true" />
      <span className="connection-words">{words}</span>
    </span>
  );
}
