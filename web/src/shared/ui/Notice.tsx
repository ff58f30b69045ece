import type { ReactNode } from "react";
import type { ApiError } from "@/shared/api/client";
import { Button } from "./Button";
import { Icon, type IconName } from "./Icon";

interface EmptyProps {
  icon: IconName;
  title: string;
  /** What to do, so that something appears here. */
  children: ReactNode;
}

/** Says that there is nothing yet, and what to do about it. */
export function Empty({ icon, title, children }: EmptyProps) {
  return (
    <div className="empty">
      <span className="empty-icon">
        <Icon name={icon} size={22} />
      </span>
      <h2>{title}</h2>
      <div className="empty-words">{children}</div>
    </div>
  );
}

/** A failed request, in the words of the server, with a way to try again. */
export function Failure({ error, onRetry }: { error: ApiError; onRetry?: () => void }) {
  return (
    <div className="failure" role="alert">
      <Icon name="error" />
      <div>
        <p>{error.message}</p>
        {error.kind !== "" && (
          <p className="muted">
            {error.kind}
            {error.status > 0 && ` · HTTP ${error.status}`}
          </p>
        )}
      </div>
      {onRetry !== undefined && <Button onClick={onRetry}>Try again</Button>}
    </div>
  );
}

/** Grey bars in place of contents that are being loaded. */
export function Loading({ rows = 3, label = "Loading" }: { rows?: number; label?: string }) {
  return (
    <div className="loading" role="status" aria-label={label}>
      {Array.from({ length: rows }, (_, index) => (
        <div key={index} className="skeleton" />
      ))}
    </div>
  );
}

/** A command to type into a terminal. */
export function Command({ children }: { children: string }) {
  return <code className="command">{children}</code>;
}
