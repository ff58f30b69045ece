import type { ReactNode } from "react";
import { useId } from "react";

interface Props {
  title: ReactNode;
  detail?: ReactNode;
  actions?: ReactNode;
  children: ReactNode;
  /** Whether the contents touch the border, as tables do. */
  flush?: boolean;
  className?: string;
}

/** A titled area of a page. */
export function Panel({ title, detail, actions, children, flush = false, className = "" }: Props) {
  const id = useId();
  return (
    <section className={`panel ${className}`} aria-labelledby={id}>
      <header className="panel-head">
        <div className="panel-title">
          <h2 id={id}>{title}</h2>
          {detail !== undefined && <span className="muted">{detail}</span>}
        </div>
        {actions !== undefined && <div className="panel-actions">{actions}</div>}
      </header>
      <div className={flush ? "panel-body flush" : "panel-body"}>{children}</div>
    </section>
  );
}
