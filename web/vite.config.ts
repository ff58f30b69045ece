import { fileURLToPath } from "node:url";
import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

/** A running coordinator, for `npm run dev`. */
const coordinator = process.env["STRATA_HTTP"] ?? "http://127.0.0.1:8470";

export default defineConfig({
  plugins: [react()],
  resolve: { alias: { "@": fileURLToPath(new URL("./src", import.meta.url)) } },
  server: { host: "127.0.0.1", proxy: { "/api": { target: coordinator, changeOrigin: true } } },
  build: {
    outDir: "../src/strata/dashboard/static",
    emptyOutDir: true,
    target: "es2022",
    // The content security policy admits files only, so nothing may be inlined as a data URL.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: true,
  },
});
