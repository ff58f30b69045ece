// Compresses the build, and writes build.json into it: a hash over everything that the build is made from. tests/unit/test_web_build.py computes
// the same hash without Node, so a change of web/ that was not built fails there.
import { createHash } from "node:crypto";
import { readFile, readdir, writeFile } from "node:fs/promises";
import { relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { constants, gzipSync } from "node:zlib";

const root = fileURLToPath(new URL("..", import.meta.url));
const built = new URL("../../src/strata/dashboard/static/", import.meta.url);
const FOLDERS = ["src", "public"];
const FILES = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"];

async function filesOf(folder) {
  const entries = await readdir(`${root}${folder}`, { recursive: true, withFileTypes: true });
  return entries
    .filter((entry) => entry.isFile())
    .map((entry) => relative(root, `${entry.parentPath}${sep}${entry.name}`).split(sep).join("/"))
    .filter((name) => !/\.test\.tsx?$/.test(name) && !name.endsWith("/testing.ts"));
}

const names = [...FILES, ...(await Promise.all(FOLDERS.map(filesOf))).flat()].sort();
const hash = createHash("sha256");
for (const name of names) {
  const contents = createHash("sha256").update(await readFile(`${root}${name}`)).digest("hex");
  hash.update(`${contents}  ${name}\n`);
}
const stamp = { sources_sha256: hash.digest("hex"), num_sources: names.length };
await writeFile(new URL("build.json", built), `${JSON.stringify(stamp)}\n`);

// The server sends these to browsers that accept gzip, so it compresses nothing itself.
for (const name of await readdir(built, { recursive: true })) {
  if (!/\.(html|js|css|svg)$/.test(name)) continue;
  const contents = await readFile(new URL(name, built));
  await writeFile(new URL(`${name}.gz`, built), gzipSync(contents, { level: constants.Z_BEST_COMPRESSION }));
}
console.log(`build.json: ${stamp.num_sources} sources, ${stamp.sources_sha256.slice(0, 12)}`);
