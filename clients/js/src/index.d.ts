/** When to send again. Times are in milliseconds. */
export interface RetryPolicy {
  /** Before retry number n the client sleeps between 0 and min(capMs, baseMs * 2^n). Default: 250. */
  baseMs?: number;
  /** Default: 8000. */
  capMs?: number;
  /** How many retries may follow each other without an event of the answer. Default: 20. */
  retriesMax?: number;
  /** The deadline of requests without `X-Request-Timeout`, counted anew from each event. Default: 600000. */
  deadlineMs?: number;
  /** How much of its deadline a request may spend asleep. Default: 0.4. */
  sleepShareMax?: number;
  /** After how long without a byte the server of a stream counts as lost. Default: never. */
  silenceMsMax?: number;
}

export interface Options {
  policy?: RetryPolicy;
  /** What sends the requests. Default: `globalThis.fetch`. */
  fetch?: typeof globalThis.fetch;
}

/**
 * Returns a `fetch` whose answers outlive their server: `new OpenAI({ baseURL, fetch: unbrokenFetch([url1, url2]) })`.
 *
 * @param baseUrls the addresses of the frontends, with or without `/v1`
 */
export function unbrokenFetch(baseUrls: readonly string[], options?: Options): typeof globalThis.fetch;
