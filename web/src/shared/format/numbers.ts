/** Numbers as people read them. A value that was not measured is shown as a dash, never as zero. */

export const DASH = "–";

type Maybe = number | null | undefined;

/** Returns a number with about four significant digits: 51,200 · 12.5 · 0.0314 · 3.1e-7. */
export function number(value: Maybe, digits = 4): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(Math.max(digits - 2, 1));
  const whole = size >= 1 ? Math.floor(Math.log10(size)) + 1 : 1;
  const decimals = size >= 1 || size === 0 ? Math.max(digits - whole, 0) : digits - 1 - Math.floor(Math.log10(size));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(Math.max(decimals, 0), 20) });
}

export function count(value: Maybe): string {
  return value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en-US");
}

/** Returns a short form for axes and tiles: 51.2k, 3.4M. */
export function compact(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size < 10_000) return number(value, 3);
  const [unit, scale] = size < 1e6 ? ["k", 1e3] : size < 1e9 ? ["M", 1e6] : size < 1e12 ? ["G", 1e9] : ["T", 1e12];
  return `${number(value / (scale as number), 3)}${unit}`;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value: Maybe): string {
  if (value === null || value === undefined) return DASH;
  let scaled = value;
  let unit = 0;
  while (Math.abs(scaled) >= 1024 && unit < BYTE_UNITS.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? scaled.toString() : number(scaled, 3)} ${BYTE_UNITS[unit] ?? ""}`;
}

export function percent(fraction: Maybe): string {
  if (fraction === null || fraction === undefined) return DASH;
  const value = fraction * 100;
  return `${value.toFixed(value !== 0 && Math.abs(value) < 10 ? 1 : 0)} %`;
}

/** Returns a value with its unit; seconds below one are shown in milliseconds. */
export function withUnit(value: Maybe, unit: string): string {
  if (value === null || value === undefined) return DASH;
  if (unit === "s") return duration(value);
  if (unit === "bytes") return bytes(value);
  return unit === "" ? number(value) : `${number(value)} ${unit}`;
}

/** Returns a duration in its two largest units: 4 ms · 12.5 s · 3 min 20 s · 2 h 5 min · 3 d 4 h. */
export function duration(seconds: Maybe): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${number(seconds * 1e6, 3)} µs`;
  if (size < 1) return `${number(seconds * 1e3, 3)} ms`;
  if (size < 10) return `${seconds.toFixed(1)} s`;
  if (size < 60) return `${Math.round(seconds)} s`;
  const steps: [string, number, string, number][] = [
    ["min", 60, "s", 1],
    ["h", 3600, "min", 60],
    ["d", 86_400, "h", 3600],
  ];
  const chosen = size < 3600 ? steps[0] : size < 86_400 ? steps[1] : steps[2];
  const [large, largeS, small, smallS] = chosen as [string, number, string, number];
  const whole = Math.floor(seconds / largeS);
  const rest = Math.floor((seconds % largeS) / smallS);
  return rest === 0 ? `${whole} ${large}` : `${whole} ${large} ${rest} ${small}`;
}

export function plural(num: number, one: string, many = `${one}s`): string {
  return `${count(num)} ${num === 1 ? one : many}`;
}
