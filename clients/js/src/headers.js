import { errorOf } from "./events.js";

export const ON_DISCONNECT = "x-on-disconnect";
export const REQUEST_ID = "x-request-id";
export const GENERATION_ID = "x-unbroken-generation-id";
export const SEED = "x-unbroken-seed";
export const LAST_EVENT_ID = "last-event-id";
export const REQUEST_TIMEOUT = "x-request-timeout";
export const SHOULD_RETRY = "x-should-retry";

/** Statuses that are worth another attempt if the server does not say whether they are. */
const RETRIED = new Set([408, 429, 502, 503, 504]);
const UNIT_MS = { ms: 1, s: 1_000, m: 60_000 };

/** Whether the plane takes this request id for that of the answer as well. */
export const isRandomId = (name) => /^([0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})$/i.test(name);

/** A time such as `30`, `30s` or `500ms`; undefined if it is none. */
export function durationMs(given) {
  const match = /^(\d+(?:\.\d+)?)(ms|s|m)?$/.exec((given ?? "").trim());
  return match === null ? undefined : Number(match[1]) * UNIT_MS[match[2] ?? "s"];
}

/** Whether the same request may be sent again. What the server says counts for more than the status. */
export function isRetryable({ status, headers, text }) {
  const told = (headers.get(SHOULD_RETRY) ?? "").toLowerCase();
  if (told === "true" || told === "false") return told === "true";
  const { retryable } = errorOf(text);
  return typeof retryable === "boolean" ? retryable : RETRIED.has(status);
}

/** The time that the server asks for before the next attempt; 0 if it asks for none. */
export function retryAfterMs(headers) {
  const ms = parseFloat(headers.get("retry-after-ms") ?? "");
  if (ms >= 0) return ms;
  const given = headers.get("retry-after") ?? "";
  const pauseMs = /^[\d.]+$/.test(given) ? Number(given) * 1_000 : Date.parse(given) - Date.now();
  return pauseMs >= 0 ? pauseMs : 0;
}
