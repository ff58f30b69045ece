import { useId, useState } from "react";
import { Link } from "wouter";
import type { HealthFinding } from "@/shared/api/types";
import { useLive } from "@/shared/live/store";
import { LevelIcon } from "@/shared/ui/Status";
import { useQuery } from "@/shared/url/useQuery";

/** The most important finding in words; opens the list of all. */
export function HealthLine() {
  const health = useLive((state) => state.health);
  const [isOpen, setOpen] = useState(false);
  const id = useId();
  const { href } = useQuery();
  if (health === undefined) return <div className="health" />;
  const more = health.num_findings - 1;

  const target = (finding: HealthFinding): string =>
    finding.worker_id === null
      ? href("/events", { job: finding.job_id })
      : href("/workers", { job: finding.job_id, q: finding.worker_id });

  if (health.findings.length === 0) {
    return (
      <div className="health" role="status">
        <LevelIcon level={health.level} />
        <span className="truncate">{health.line}</span>
      </div>
    );
  }
  return (
    <div
      className="health"
      onKeyDown={(event) => {
        if (event.key === "Escape") setOpen(false);
      }}
      onBlur={(event) => {
        if (!event.currentTarget.contains(event.relatedTarget)) setOpen(false);
      }}
      role="presentation"
    >
      <button
        type="button"
        className={`health-button ${health.level}`}
        aria-expanded={isOpen}
        aria-controls={id}
        onClick={() => {
          setOpen(!isOpen);
        }}
      >
        <LevelIcon level={health.level} />
        <span className="truncate" role="status">
          {health.line}
        </span>
        {more > 0 && <span className="health-more">+{more}</span>}
      </button>
      {isOpen && (
        <ul className="popover" id={id}>
          {health.findings.map((finding, index) => (
            <li key={index}>
              <Link
                href={target(finding)}
                onClick={() => {
                  setOpen(false);
                }}
              >
                <LevelIcon level={finding.level} />
                <span>
                  {finding.line}
                  {finding.job_id !== "" && <span className="muted"> · {finding.job_id}</span>}
                </span>
              </Link>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
