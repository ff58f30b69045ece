import { percent } from "@/shared/format/numbers";

export function Progress({ fraction, label }: { fraction: number | null; label: string }) {
  if (fraction === null) return <span className="muted">–</span>;
  return (
    <span className="progress">
      <progress max={1} value={fraction} aria-label={label} />
      <span className="num">{percent(fraction)}</span>
    </span>
  );
}
