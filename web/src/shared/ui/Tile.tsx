import type { ReactNode } from "react";

interface Props {
  label: string;
  value: ReactNode;
  unit?: string;
  detail?: ReactNode;
}

/** One figure with its name, unit and context. */
export function Tile({ label, value, unit, detail }: Props) {
  return (
    <div className="tile">
      <dt>{label}</dt>
      <dd>
        <span className="tile-value num">{value}</span>{" "}
        {unit !== undefined && <span className="tile-unit">{unit}</span>}
        {detail !== undefined && <div className="tile-detail">{detail}</div>}
      </dd>
    </div>
  );
}
