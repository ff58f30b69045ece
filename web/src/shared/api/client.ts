/** Requests to the coordinator: one error type, one place that notices an expired login. */

export class ApiError extends Error {
  readonly status: number;
  readonly kind: string;
  readonly field: string;

  constructor(status: number, kind: string, message: string, field = "") {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.kind = kind;
    this.field = field;
  }
}

export type Params = Record<string, string | number | boolean | readonly string[] | null | undefined>;

/** Header that no other site's page can send; requests that change something carry it. */
const CSRF = { "x-strata-request": "1" };
const TIMEOUT_MS = 60_000;

let onUnauthenticated: () => void = () => undefined;

/** Sets what happens if a request is answered with 401. */
export function whenUnauthenticated(call: () => void): void {
  onUnauthenticated = call;
}

/** Returns a path with its query; parameters that are null or empty are left out. */
export function address(path: string, params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value === null || value === undefined || value === "") continue;
    if (typeof value === "object") for (const one of value) query.append(name, one);
    else query.append(name, String(value));
  }
  const text = query.toString();
  return text === "" ? path : `${path}?${text}`;
}

interface ErrorBody {
  error?: { kind?: string; message?: string; field?: string };
}

async function failure(response: Response): Promise<ApiError> {
  try {
    const { error } = (await response.json()) as ErrorBody;
    if (error?.message !== undefined) {
      return new ApiError(response.status, error.kind ?? "", error.message, error.field ?? "");
    }
  } catch {
    // Not JSON: a proxy answered.
  }
  return new ApiError(response.status, "", `the server answered ${response.status} ${response.statusText}`.trim());
}

async function send(method: string, url: string, body: unknown, signal: AbortSignal | undefined): Promise<Response> {
  const timeout = AbortSignal.timeout(TIMEOUT_MS);
  const init: RequestInit = {
    method,
    credentials: "same-origin",
    signal: signal === undefined ? timeout : AbortSignal.any([signal, timeout]),
    headers: {
      accept: "application/json",
      ...(method === "GET" ? {} : CSRF),
      ...(body === undefined ? {} : { "content-type": "application/json" }),
    },
  };
  if (body !== undefined) init.body = JSON.stringify(body);
  let response: Response;
  try {
    response = await fetch(url, init);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "Unreachable", "The coordinator does not answer; the page tries again by itself.");
  }
  if (response.ok) return response;
  if (response.status === 401) onUnauthenticated();
  throw await failure(response);
}

export async function get<T>(path: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
  return (await (await send("GET", address(path, params), undefined, signal)).json()) as T;
}

export async function post<T>(path: string, body: unknown): Promise<T> {
  const response = await send("POST", path, body, undefined);
  return (response.status === 204 ? undefined : await response.json()) as T;
}

export async function remove(path: string): Promise<void> {
  await send("DELETE", path, undefined, undefined);
}
