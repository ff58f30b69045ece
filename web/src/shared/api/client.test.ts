import { afterEach, expect, test, vi } from "vitest";
import { ApiError, address, get, post, whenUnauthenticated } from "./client";

afterEach(() => {
  vi.unstubAllGlobals();
  whenUnauthenticated(() => undefined);
});

function answer(status: number, body: unknown): ReturnType<typeof vi.fn> {
  const call = vi.fn(() => Promise.resolve(new Response(JSON.stringify(body), { status })));
  vi.stubGlobal("fetch", call);
  return call;
}

test("repeated parameters are appended, and empty ones left out", () => {
  expect(address("/api/history", { job: "a b", name: ["loss", "lr"], since_s: null, x: "" })).toBe(
    "/api/history?job=a+b&name=loss&name=lr",
  );
});

test("an error carries the coordinator's kind, message and field", async () => {
  answer(404, { error: { kind: "UnknownJob", message: "no job x; see /api/jobs", field: "job" } });
  const error = await get("/api/jobs").catch((reason: unknown) => reason);
  expect(error).toBeInstanceOf(ApiError);
  expect(error).toMatchObject({ status: 404, kind: "UnknownJob", message: "no job x; see /api/jobs", field: "job" });
});

test("a 401 asks for the login once", async () => {
  const asked = vi.fn();
  whenUnauthenticated(asked);
  answer(401, { error: { kind: "Unauthenticated", message: "the token is missing", field: "" } });
  await expect(get("/api/overview")).rejects.toMatchObject({ status: 401 });
  expect(asked).toHaveBeenCalledTimes(1);
});

test("a request that changes something carries the header against cross-site requests", async () => {
  const call = answer(200, {});
  await post("/api/login", { token: "t" });
  const init = call.mock.calls[0]?.[1] as RequestInit;
  expect(init.headers).toMatchObject({ "x-strata-request": "1", "content-type": "application/json" });
});

test("an unreachable coordinator is an error in words", async () => {
  vi.stubGlobal("fetch", () => Promise.reject(new TypeError("failed to fetch")));
  await expect(get("/api/overview")).rejects.toMatchObject({ status: 0, kind: "Unreachable" });
});
