import jsxA11y from "eslint-plugin-jsx-a11y";
import reactHooks from "eslint-plugin-react-hooks";
import tseslint from "typescript-eslint";

const FEATURES = ["overview", "workers", "events", "checkpoints", "goodput", "recovery", "tuning"];

/** Imports point down: app → features → shared, and no feature imports another one. */
function layer(files, forbidden) {
  return {
    files,
    rules: {
      "no-restricted-imports": [
        "error",
        { patterns: [...forbidden, { group: ["../*"], message: "Import from another folder with @/." }] },
      ],
    },
  };
}

export default tseslint.config(
  { ignores: ["node_modules", "src/shared/api/generated"] },
  ...tseslint.configs.strict,
  jsxA11y.flatConfigs.strict,
  {
    files: ["src/**/*.{ts,tsx}"],
    plugins: { "react-hooks": reactHooks },
    rules: {
      "react-hooks/rules-of-hooks": "error",
      "react-hooks/exhaustive-deps": "error",
      "@typescript-eslint/consistent-type-imports": "error",
      "no-console": "error",
    },
  },
  layer(
    ["src/shared/**"],
    [{ group: ["@/app/*", "@/features/*"], message: "shared is below app and features." }],
  ),
  ...FEATURES.map((feature) =>
    layer(
      [`src/features/${feature}/**`],
      [
        { group: ["@/app/*"], message: "features are below app." },
        {
          group: FEATURES.filter((other) => other !== feature).map((other) => `@/features/${other}/*`),
          message: "A feature does not import another feature; move what both need to shared.",
        },
      ],
    ),
  ),
);
