import type uPlot from "uplot";
import { token } from "@/shared/theme/theme";
import { download, fileName } from "@/shared/ui/download";

/** Saves a chart as a picture with its title, in the colours of the page. */
export function downloadPng(plot: uPlot, title: string, subtitle: string): void {
  const chart = plot.ctx.canvas;
  const scale = window.devicePixelRatio || 1;
  const head = 40 * scale;
  const canvas = document.createElement("canvas");
  canvas.width = chart.width;
  canvas.height = chart.height + head;
  const context = canvas.getContext("2d");
  if (context === null) return;
  context.fillStyle = token("--surface");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = token("--text");
  context.font = `600 ${14 * scale}px ${token("--font")}`;
  context.fillText(title, 12 * scale, 18 * scale);
  context.fillStyle = token("--text-3");
  context.font = `${11 * scale}px ${token("--font")}`;
  context.fillText(subtitle, 12 * scale, 33 * scale);
  context.drawImage(chart, 0, head);
  canvas.toBlob((blob) => {
    if (blob !== null) download(blob, `${fileName("strata", title)}.png`);
  });
}
