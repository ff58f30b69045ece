/** Line icons, 16 × 16, in the colour of the text. They are decoration: the text beside them has the meaning. */
const PATHS = {
  overview: "M2.5 9.5 5.5 6l3 2.5 5-5.5M2.5 13.5h11",
  workers: "M2.5 3h4v4h-4zM9.5 3h4v4h-4zM2.5 9.5h4v4h-4zM9.5 9.5h4v4h-4z",
  events: "M3 4h.01M3 8h.01M3 12h.01M6 4h7.5M6 8h7.5M6 12h5",
  checkpoints: "M8 2 2.5 4.75 8 7.5l5.5-2.75zM2.5 8 8 10.75 13.5 8M2.5 11.25 8 14l5.5-2.75",
  search: "M7 12A5 5 0 1 0 7 2a5 5 0 0 0 0 10zM10.7 10.7 14 14",
  sun: "M8 10.75a2.75 2.75 0 1 0 0-5.5 2.75 2.75 0 0 0 0 5.5zM8 1.5v1M8 13.5v1M1.5 8h1M13.5 8h1M3.4 3.4l.7.7M11.9 11.9l.7.7M12.6 3.4l-.7.7M4.1 11.9l-.7.7",
  moon: "M13.5 9.5A6 6 0 0 1 6.5 2.5 6 6 0 1 0 13.5 9.5z",
  system: "M2 3h12v8H2zM5.5 13.5h5M8 11v2.5",
  ok: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM5.3 8.2 7.2 10l3.5-3.8",
  warning: "M8 2.5 14.2 13.5H1.8zM8 6.7v3M8 11.5h.01",
  error: "M5.5 2h5L14 5.5v5L10.5 14h-5L2 10.5v-5zM8 5v3.6M8 10.9h.01",
  info: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM8 7.3v3.5M8 5.2h.01",
  chevron: "m6 4 4 4-4 4",
  down: "m4 6 4 4 4-4",
  close: "m4 4 8 8M12 4l-8 8",
  download: "M8 2.5v7.5M4.8 7 8 10.2 11.2 7M2.5 13.5h11",
  zoomOut: "M7 12A5 5 0 1 0 7 2a5 5 0 0 0 0 10zM10.7 10.7 14 14M5 7h4",
  expand: "M9.5 2.5h4v4M6.5 13.5h-4v-4M13.5 2.5 9 7M2.5 13.5 7 9",
  link: "M6.8 9.2a2.7 2.7 0 0 0 3.9 0l2-2a2.75 2.75 0 0 0-3.9-3.9l-.9.9M9.2 6.8a2.7 2.7 0 0 0-3.9 0l-2 2a2.75 2.75 0 0 0 3.9 3.9l.9-.9",
  compare: "M5 2.5v11M11 2.5v11M2.5 5 5 2.5 7.5 5M8.5 11l2.5 2.5 2.5-2.5",
  follow: "M2 11.5c2.5 0 2.5-7 5-7s2.5 5 4 5 1.5-3 3-3",
  folder: "M2 4h4l1.5 1.5H14V13H2z",
  tensor: "M3 3h10v10H3zM3 6.3h10M3 9.7h10M6.3 3v10M9.7 3v10",
  tuning: "M4 2.5v5M4 10.5v3M8 2.5v2M8 7.5v6M12 2.5v6M12 11.5v2M2.5 9h3M6.5 6h3M10.5 10h3",
  logout: "M6 2.5H3v11h3M9.5 5 12.5 8l-3 3M12.5 8H6",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 16 }: { name: IconName; size?: number }) {
  return (
    <svg
      className="icon"
      width={size}
      height={size}
      viewBox="0 0 16 16"
      fill="none"
      stroke="currentColor"
      strokeWidth="1.5"
      strokeLinecap="round"
      strokeLinejoin="round"
      aria-hidden="true"
    >
      <path d={PATHS[name]} />
    </svg>
  );
}
