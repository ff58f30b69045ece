const pad = (value: number): string => value.toString().padStart(2, "0");

/** Returns the local time of day of a moment, 14:05:09. */
export function clock(atS: number): string {
  const at = new Date(atS * 1000);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

/** Returns the local date of a moment, 2026-11-18. */
export function day(atS: number): string {
  const at = new Date(atS * 1000);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
}

export function moment(atS: number): string {
  return `${day(atS)} ${clock(atS)}`;
}
