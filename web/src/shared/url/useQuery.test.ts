import { expect, test } from "vitest";
import { patched } from "./useQuery";

test("a parameter is set, replaced and removed, and the others stay", () => {
  expect(patched("?job=a", { state: "ERROR" })).toBe("job=a&state=ERROR");
  expect(patched("job=a&state=ERROR", { state: "IDLE" })).toBe("job=a&state=IDLE");
  expect(patched("job=a&state=ERROR", { state: null })).toBe("job=a");
  expect(patched("job=a", { job: "" })).toBe("");
});

test("names with markup and spaces survive the address", () => {
  const query = patched("", { worker: "<script>alert(1)</script> & co" });
  expect(new URLSearchParams(query).get("worker")).toBe("<script>alert(1)</script> & co");
});
