import { useRef } from "react";
import type { StoredCheckpoint } from "@/shared/api/types";
import { bytes, count } from "@/shared/format/numbers";
import { clock, moment } from "@/shared/format/times";
import { useSize } from "@/shared/ui/useSize";
import { radius, spots } from "./lanes";

interface Props {
  items: readonly StoredCheckpoint[];
  chosen: string;
  against: string;
  /** `isSecond`: chosen with Shift, to compare. */
  onChoose: (id: string, isSecond: boolean) => void;
}

const LANE_PX = 44;
const MARGIN = 28;

function nameOf(item: StoredCheckpoint): string {
  return item.step === null ? item.id : `step ${count(item.step)}`;
}

/** Checkpoints by time, one lane per branch; arcs lead from a delta to its parent, and the area is the size. */
export function Timeline({ items, chosen, against, onChoose }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const { width } = useSize(host);
  const placed = spots(items);
  const numLanes = Math.max(...placed.map((spot) => spot.lane), 0) + 1;
  const height = numLanes * LANE_PX + 26;
  const largest = Math.max(...items.map((item) => item.size_bytes), 1);
  const toX = (x: number): number => MARGIN + x * Math.max(width - 2 * MARGIN, 1);
  const toY = (lane: number): number => 22 + lane * LANE_PX;
  const byId = new Map(placed.map((spot) => [spot.item.id, spot]));
  const order = placed.map((spot) => spot.item.id);
  const move = (from: string, by: number): void => {
    const next = order[order.indexOf(from) + by];
    if (next === undefined) return;
    onChoose(next, false);
    requestAnimationFrame(() => host.current?.querySelector<SVGGElement>('[aria-checked="true"]')?.focus());
  };
  const first = placed[0];
  const last = placed.at(-1);
  return (
    <div ref={host} className="timeline">
      {width > 0 && (
        <svg width={width} height={height} role="radiogroup" aria-label="Checkpoints, oldest first">
          {Array.from({ length: numLanes }, (_, lane) => (
            <line key={lane} x1={MARGIN} x2={width - MARGIN} y1={toY(lane)} y2={toY(lane)} className="timeline-lane" />
          ))}
          {placed.map(({ item, x, lane }) => {
            const parent = byId.get(item.parent);
            if (parent === undefined) return null;
            const [ax, ay, bx, by] = [toX(parent.x), toY(parent.lane), toX(x), toY(lane)];
            return (
              <path
                key={`link ${item.id}`}
                d={`M${ax} ${ay}C${ax + (bx - ax) / 3} ${ay + 22} ${bx - (bx - ax) / 3} ${by + 22} ${bx} ${by}`}
                className="timeline-link"
              />
            );
          })}
          {placed.map(({ item, x, lane }) => {
            const size = radius(item.size_bytes, largest);
            const isChosen = item.id === chosen;
            const words = `${nameOf(item)}, ${item.type?.toLowerCase().replace("_", " ") ?? "file"}, ${bytes(item.size_bytes)}, ${moment(item.created_at_s)}`;
            return (
              <g
                key={item.id}
                role="radio"
                aria-checked={isChosen}
                aria-label={words}
                tabIndex={isChosen ? 0 : -1}
                transform={`translate(${toX(x)} ${toY(lane)})`}
                className={`timeline-mark ${isChosen ? "chosen" : ""} ${item.id === against ? "against" : ""}`}
                onClick={(event) => {
                  onChoose(item.id, event.shiftKey);
                }}
                onKeyDown={(event) => {
                  if (event.key === "ArrowRight" || event.key === "ArrowDown") move(item.id, 1);
                  else if (event.key === "ArrowLeft" || event.key === "ArrowUp") move(item.id, -1);
                  else if (event.key === "Enter" || event.key === " ") onChoose(item.id, event.shiftKey);
                  else return;
                  event.preventDefault();
                }}
              >
                <title>{words}</title>
                <circle r={14} className="timeline-target" />
                {item.type === "INCREMENTAL" ? (
                  <rect x={-size * 0.8} y={-size * 0.8} width={size * 1.6} height={size * 1.6} transform="rotate(45)" />
                ) : (
                  <circle r={size} />
                )}
              </g>
            );
          })}
          {first !== undefined && last !== undefined && (
            <g className="timeline-ends">
              <text x={MARGIN - 14} y={height - 4}>
                {clock(first.item.created_at_s)}
              </text>
              {last !== first && (
                <text x={width - MARGIN + 14} y={height - 4} textAnchor="end">
                  {clock(last.item.created_at_s)}
                </text>
              )}
            </g>
          )}
        </svg>
      )}
      <p className="timeline-legend muted">
        <span>● full or partial</span>
        <span>◆ incremental, with its parent</span>
        <span>area: size</span>
        <span>Shift-click: compare</span>
      </p>
    </div>
  );
}
