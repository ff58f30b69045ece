export type Rgb = [number, number, number];

/** Reads a colour written as #rrggbb. */
export function parse(colour: string): Rgb {
  const part = (at: number): number => Number.parseInt(colour.slice(at, at + 2), 16) || 0;
  return [part(1), part(3), part(5)];
}

interface Palette {
  low: Rgb;
  middle: Rgb;
  high: Rgb;
}

/** Returns the colour of a value from −1 to 1. The root makes small values visible. */
export function diverging(value: number, { low, middle, high }: Palette): Rgb {
  const share = Math.min(Math.sqrt(Math.abs(value)), 1);
  const end = value < 0 ? low : high;
  return middle.map((from, index) => Math.round(from + ((end[index] ?? 0) - from) * share)) as Rgb;
}
