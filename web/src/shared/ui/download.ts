const REVOKE_AFTER_MS = 10_000;

/** Saves a blob as a file of the reader. */
export function download(blob: Blob, name: string): void {
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  window.setTimeout(() => {
    URL.revokeObjectURL(url);
  }, REVOKE_AFTER_MS);
}

/** Returns a name that every file system accepts. */
export function fileName(...parts: string[]): string {
  return parts.map((part) => part.replace(/[^A-Za-z0-9._-]+/g, "_")).join("-").slice(0, 120);
}
