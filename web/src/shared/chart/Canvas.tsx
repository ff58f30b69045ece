import { type PointerEvent, useEffect, useRef } from "react";
import { useTheme } from "@/shared/theme/theme";
import { type Size, useSize } from "@/shared/ui/useSize";

interface Props {
  /** What the picture shows, for readers who do not see it. */
  label: string;
  height: number;
  draw: (context: CanvasRenderingContext2D, size: Size) => void;
  /** Called with the position of the pointer, and with null when it leaves. */
  onPoint?: (at: { x: number; y: number; width: number } | null) => void;
}

/** A canvas as wide as its place and as sharp as the screen. Pass a stable `draw`: a new one draws again. */
export function Canvas({ label, height, draw, onPoint }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const { width } = useSize(host);
  const theme = useTheme((state) => state.theme);
  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (element === null || context === null || context === undefined || width === 0) return;
    const scale = window.devicePixelRatio || 1;
    element.width = width * scale;
    element.height = height * scale;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, { width, height });
  }, [draw, width, height, theme]);
  const point = (event: PointerEvent): void => {
    const box = event.currentTarget.getBoundingClientRect();
    onPoint?.({ x: event.clientX - box.left, y: event.clientY - box.top, width });
  };
  return (
    <div ref={host} className="canvas-host" style={{ height }} role="img" aria-label={label}>
      <canvas
        ref={canvas}
        aria-hidden="true"
        style={{ width: "100%", height }}
        onPointerMove={point}
        onPointerDown={point}
        onPointerLeave={() => onPoint?.(null)}
      />
    </div>
  );
}
