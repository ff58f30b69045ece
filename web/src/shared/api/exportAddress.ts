import { address } from "./client";

/** Returns the address of a checkpoint as one safetensors file. */
export function exportAddress(place: string, id: string): string {
  return address("/api/explorer/export", { place, id });
}
