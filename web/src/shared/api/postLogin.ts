import { post } from "./client";
import type { LoginAnswer } from "./types";

/** Exchanges a token for a session cookie; the token is sent in the body once and kept nowhere. */
export function postLogin(token: string): Promise<LoginAnswer> {
  return post("/api/login", { token });
}
