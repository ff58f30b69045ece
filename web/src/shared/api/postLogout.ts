import { post } from "./client";

export function postLogout(): Promise<void> {
  return post("/api/logout", undefined);
}
