// Generates src/shared/api/generated/*.d.ts from openapi/*.json. `npm run api` after scripts/renew_openapi.sh.
import { readFile, readdir, writeFile } from "node:fs/promises";
import openapiTS, { astToString } from "openapi-typescript";

const from = new URL("../openapi/", import.meta.url);
const to = new URL("../src/shared/api/generated/", import.meta.url);

for (const name of (await readdir(from)).filter((each) => each.endsWith(".json")).sort()) {
  const document = JSON.parse(await readFile(new URL(name, from), "utf8"));
  const types = astToString(await openapiTS(document));
  const target = name.replace(".json", ".d.ts");
  await writeFile(new URL(target, to), `// Generated from openapi/${name} by \`npm run api\`.\n${types}`);
  console.log(`${name} → src/shared/api/generated/${target}`);
}
