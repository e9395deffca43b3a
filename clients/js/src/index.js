import { Addresses } from "./addresses.js";
import { encode } from "./events.js";
import { Exchange, isGeneration } from "./exchange.js";

const CANCEL_MS_MAX = 2_000;
/** Headers of a body that has been decoded. */
const OF_THE_BODY = ["content-encoding", "content-length", "transfer-encoding"];

export function unbrokenFetch(baseUrls, { policy, fetch = globalThis.fetch } = {}) {
  const addresses = new Addresses(baseUrls);
  return async (input, init) => {
    const path = addresses.pathOf(input.url ?? String(input));
    const method = (init?.method ?? input.method ?? "GET").toUpperCase();
    const isKnown = path !== undefined && (isList(method, path) || isGeneration(method, path));
    if (!isKnown) return fetch(input, init);
    const request = new Request(input, init);
    const content = method === "GET" ? undefined : await request.text();
    const exchange = new Exchange({ method, path, headers: request.headers, content }, addresses, policy);
    return new Conversation(fetch, init, request.signal, exchange).begin();
  };
}

const isList = (method, path) => method === "GET" && path.startsWith("/v1/models");

/** Sends what an exchange decides. `init`: further options of the user's fetch. */
class Conversation {
  #fetch;
  #init;
  #signal;
  #exchange;
  #reader;
  #attempt = new AbortController();
  #onAbort = () => {
    this.#attempt.abort(this.#signal.reason);
    void this.#cancel();
  };

  constructor(fetch, init, signal, exchange) {
    this.#fetch = fetch;
    this.#init = init;
    this.#signal = signal;
    this.#exchange = exchange;
  }

  /** The response that the user gets. */
  async begin() {
    this.#signal.addEventListener("abort", this.#onAbort);
    const { status, statusText, headers, text, body } = await this.#open();
    const init = { status, statusText, headers: withoutBodys(headers) };
    if (!this.#exchange.hasStream) return new Response(text === "" ? null : text, init);
    this.#reader = body.getReader();
    const events = this.#events();
    const stream = new ReadableStream({
      pull: async (controller) => {
        const { value, done } = await events.next();
        if (done) controller.close();
        else controller.enqueue(encode(value));
      },
      cancel: () => this.#leave(),
    });
    return new Response(stream, init);
  }

  /** The next response that is a stream, or final and complete, with its `text`. */
  async #open() {
    for (;;) {
      const { url, ...sent } = this.#exchange.nextRequest();
      let response, text, pauseMs;
      try {
        this.#signal.throwIfAborted();
        this.#attempt = new AbortController();
        response = await this.#heard(this.#fetch(url, { ...this.#init, ...sent, signal: this.#attempt.signal }));
        if (this.#exchange.beginsStream(response)) return response;
        text = await response.text();
      } catch (error) {
        if (this.#signal.aborted) throw error;
        if ((pauseMs = this.#exchange.lost(error)) === undefined) {
          void this.#cancel();
          throw error;
        }
      }
      if (pauseMs === undefined) {
        const { status, statusText, headers } = response;
        const whole = { status, statusText, headers: new Headers(headers), text };
        if ((pauseMs = this.#exchange.answered(whole)) === undefined) return this.#end(whole);
      }
      await sleep(pauseMs, this.#signal);
    }
  }

  /** Waits for the server of a stream. Ends the attempt if it is silent for too long: it may be frozen. */
  async #heard(waiting) {
    const { silenceMsMax } = this.#exchange;
    if (silenceMsMax === undefined) return waiting;
    const attempt = this.#attempt;
    let timer;
    const silence = new Promise((_, reject) => {
      timer = setTimeout(() => {
        const error = new TypeError(`the server has been silent for ${silenceMsMax} ms`);
        attempt.abort(error);
        reject(error);
      }, silenceMsMax);
    });
    try {
      return await Promise.race([waiting, silence]);
    } finally {
      clearTimeout(timer);
    }
  }

  /** The events of an answer, from as many responses as it takes. */
  async *#events() {
    const exchange = this.#exchange;
    while (!exchange.isComplete) {
      let error;
      try {
        for (let piece; !exchange.isComplete && !exchange.isBroken; ) {
          piece = await this.#heard(this.#reader.read());
          if (piece.done) break;
          const events = exchange.feed(piece.value);
          if (events) yield events;
        }
        error = exchange.closed();
      } catch (lost) {
        if (this.#signal.aborted) throw lost;
        error = lost;
      }
      const last = error === undefined ? exchange.rest() : await this.#resume(error);
      if (last) yield last;
    }
    this.#end();
    void this.#reader.cancel().catch(() => {});
  }

  /** Opens the next response. Returns the last event if the answer cannot go on. */
  async #resume(error) {
    void this.#reader.cancel().catch(() => {});
    const pauseMs = this.#exchange.broke();
    if (pauseMs === undefined) return this.#exchange.lastWords(error);
    await sleep(pauseMs, this.#signal);
    let response;
    try {
      response = await this.#open();
    } catch (lost) {
      if (this.#signal.aborted) throw lost;
      return this.#exchange.lastWords(lost);
    }
    if (!this.#exchange.hasStream) return this.#exchange.lastWords(error, response);
    this.#reader = response.body.getReader();
    return "";
  }

  /** The user reads no further. */
  async #leave() {
    await this.#cancel();
    await this.#reader.cancel().catch(() => {});
  }

  /** Tells the plane that nobody wants the answer any more. */
  async #cancel() {
    const request = this.#exchange.cancelRequest();
    this.#end();
    if (request === undefined) return;
    const { url, ...sent } = request;
    try {
      await this.#fetch(url, { ...sent, signal: AbortSignal.timeout(CANCEL_MS_MAX) });
    } catch {
      // The plane ends an answer by itself that nobody comes back for.
    }
  }

  #end(result) {
    this.#exchange.isComplete = true;
    this.#signal.removeEventListener("abort", this.#onAbort);
    return result;
  }
}

function withoutBodys(headers) {
  const kept = new Headers(headers);
  for (const name of OF_THE_BODY) kept.delete(name);
  return kept;
}

function sleep(ms, signal) {
  if (signal.aborted) throw signal.reason;
  if (ms === 0) return undefined;
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", onAbort);
      resolve();
    }, ms);
    const onAbort = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    signal.addEventListener("abort", onAbort, { once: true });
  });
}
