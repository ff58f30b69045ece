import type { ScanState } from "@/shared/api/types";
import { count } from "@/shared/format/numbers";

/** How far a scan is, and which tensors it had to skip. */
export function ScanNote({ scan, num, what }: { scan: ScanState; num: number; what: string }) {
  const problems = Object.keys(scan.problems).length;
  return (
    <div className="scan" role="status">
      <span>
        {count(num)} {what}
        {problems > 0 && `, ${count(problems)} could not be read`}
      </span>
      {!scan.is_complete && (
        <span className="progress">
          <progress max={Math.max(scan.num_needed, 1)} value={scan.num_done} aria-label="Tensors read" />
          <span className="num">
            {count(scan.num_done)} of {count(scan.num_needed)}
          </span>
        </span>
      )}
    </div>
  );
}
