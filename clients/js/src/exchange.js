// Decides what is sent for one request of the user, and what of the answers the user gets. It does no I/O.
import { crypto } from "#random";
import { EventCutter, errorOf, jsonObject } from "./events.js";
import {
  GENERATION_ID,
  LAST_EVENT_ID,
  ON_DISCONNECT,
  REQUEST_ID,
  REQUEST_TIMEOUT,
  SEED,
  SHOULD_RETRY,
  durationMs,
  isRandomId,
  isRetryable,
  retryAfterMs,
} from "./headers.js";
import { Journal } from "./journal.js";
import { Retries } from "./retries.js";

const EVENTS_TYPE = "text/event-stream";
const GENERATIONS = new Set(["/v1/completions", "/v1/chat/completions"]);
/** Statuses of a plane that does not have an answer, and of other servers. */
const GONE = new Set([404, 405, 410]);
/** The server cannot have got the request. Browsers do not tell. */
const UNSENT = new Set(["ECONNREFUSED", "ENOTFOUND", "EAI_AGAIN", "EHOSTUNREACH", "ENETUNREACH", "UND_ERR_CONNECT_TIMEOUT"]);

/** What the next request is. */
const SEND = "send"; // The user's request: as long as the user has nothing of the answer and the plane has nothing.
const RESUME = "resume"; // The plane may have the answer: GET /v1/streams/{id}, from the last event that the user has.
const CONTINUE = "continue"; // The plane has lost it, but its tokens are known: with `generated_token_ids`.

/** Whether a request asks for an answer that can be resumed. `path`: below the base URL. */
export const isGeneration = (method, path) => method === "POST" && GENERATIONS.has(path.split("?")[0]);

/** 128 random bits. `crypto.randomUUID` is missing on pages that were loaded over plain HTTP. */
const randomId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** One request of the user, from its first attempt to the end of its answer. */
export class Exchange {
  /** After how long without a byte the server is lost; undefined: never. */
  silenceMsMax;
  hasStream = false;
  isComplete = false;
  #method;
  #path;
  #headers;
  #content;
  #addresses;
  #address;
  #retries;
  #isDeadlineTold;
  #isGeneration;
  #isStreamed = false;
  #isCancelledByLeaving = false;
  #journal;
  #generationId;
  #step = SEND;
  #cutter = new EventCutter();
  #cursor;
  #hasDelivered = false;
  #held = "";
  #failure;

  /** `content`: the text of the body, or undefined. `path`: below the base URL. */
  constructor({ method, path, headers, content }, addresses, policy) {
    this.#method = method;
    this.#path = path;
    this.#headers = new Headers(headers);
    this.#content = content;
    this.#addresses = addresses;
    this.#address = addresses.current;
    this.#isGeneration = isGeneration(method, path);
    if (this.#isGeneration) this.#prepare(jsonObject(content));
    const timeoutMs = durationMs(this.#headers.get(REQUEST_TIMEOUT));
    this.#isDeadlineTold = timeoutMs !== undefined;
    this.#retries = new Retries(policy, timeoutMs);
    if (this.#isStreamed) this.silenceMsMax = policy?.silenceMsMax;
  }

  #prepare(body) {
    const headers = this.#headers;
    if (!headers.get(REQUEST_ID)) headers.set(REQUEST_ID, randomId());
    this.#isCancelledByLeaving = !headers.has(ON_DISCONNECT);
    if (this.#isCancelledByLeaving) headers.set(ON_DISCONNECT, "continue");
    const isKept = headers.get(ON_DISCONNECT).toLowerCase() === "continue" && isRandomId(headers.get(REQUEST_ID));
    if (isKept) this.#generationId = headers.get(REQUEST_ID);
    this.#isStreamed = body.stream === true;
    if (this.#isStreamed && body.return_token_ids === true) this.#journal = new Journal(body, this.#path.includes("chat"));
  }

  // Requests

  /** The next request to send: its `url`, `method`, `headers` and `body`. */
  nextRequest() {
    this.#address = this.#addresses.current;
    const headers = new Headers(this.#headers);
    if (this.#isDeadlineTold) headers.set(REQUEST_TIMEOUT, (Math.max(1, this.#retries.remainingMs) / 1_000).toFixed(3));
    if (this.#step === RESUME) return this.#resume(headers);
    const body = this.#step === CONTINUE ? this.#journal.continuation() : this.#content;
    return { url: this.#address + this.#path, method: this.#method, headers, body };
  }

  #resume(headers) {
    for (const name of ["content-length", "content-type"]) headers.delete(name);
    headers.set("accept", this.#isStreamed ? EVENTS_TYPE : "application/json");
    if (this.#cursor !== undefined) headers.set(LAST_EVENT_ID, this.#cursor);
    return { url: `${this.#address}/v1/streams/${this.#generationId}`, method: "GET", headers, body: undefined };
  }

  /** The request that ends an answer which the user has abandoned; undefined if it ends by itself or is to go on. */
  cancelRequest() {
    if (!this.#isCancelledByLeaving || this.#generationId === undefined || this.isComplete) return undefined;
    const authorization = this.#headers.get("authorization");
    const headers = new Headers(authorization === null ? {} : { authorization });
    // A name is known to one server, the id of the answer to all: a balancer may send the cancel anywhere.
    const given = this.#headers.get(REQUEST_ID);
    const name = isRandomId(given) ? given : this.#generationId;
    return { url: `${this.#address}/v1/requests/${name}/cancel`, method: "POST", headers };
  }

  // What came of them. Each function returns how long to pause before the next request.

  /** No response came, or only a part of one that is not streamed. Undefined: give up. */
  lost(error) {
    this.#leave();
    if (!UNSENT.has(error?.cause?.code) && !this.#turn()) return undefined;
    return this.#retries.pauseMs({ freeCount: this.#addresses.count - 1 });
  }

  /** A complete response came: its `status`, `headers` (which may change) and `text`. Undefined: it is the user's. */
  answered(response) {
    const { status, headers, text } = response;
    if (this.#step === RESUME && (GONE.has(status) || status === 409) && this.#beginAnew(status, text)) return 0;
    const isFine = status >= 200 && status < 300;
    if (isFine || !isRetryable(response)) {
      this.isComplete = true;
      return undefined;
    }
    this.#leave();
    const isLeaving = errorOf(text).code === "DRAINING";
    const others = this.#addresses.count - 1;
    const pauseMs = this.#retries.pauseMs({
      atLeastMs: isLeaving && others ? 0 : retryAfterMs(headers),
      freeCount: isLeaving ? others : 0,
    });
    if (pauseMs === undefined) {
      headers.set(SHOULD_RETRY, "false"); // Enough has been tried.
      this.isComplete = true;
    }
    return pauseMs;
  }

  #leave() {
    this.#addresses.leave(this.#address);
    this.#address = this.#addresses.current;
  }

  /** Decide how to get what is missing. Returns whether there is a way. */
  #turn() {
    if (this.#generationId !== undefined) this.#step = RESUME;
    else if (this.#hasDelivered) return this.#continue();
    else if (this.#step !== CONTINUE) this.#step = SEND;
    return true;
  }

  /** The plane does not have the answer. Returns whether the rest can be had all the same. */
  #beginAnew(status, text) {
    const isDiverged = errorOf(text).code === "RESUME_DIVERGED";
    if (status === 409 && !isDiverged) return false;
    if (!this.#hasDelivered) {
      this.#step = SEND;
      return true;
    }
    if (!this.#continue()) return false;
    if (isDiverged) {
      this.#generationId = randomId();
      this.#headers.set(REQUEST_ID, this.#generationId);
    }
    return true;
  }

  get #canContinue() {
    return this.#journal?.canContinue ?? false;
  }

  #continue() {
    if (this.#canContinue) this.#step = CONTINUE;
    return this.#canContinue;
  }

  // The stream

  /** Whether the response is a stream of events. If so, `feed` takes its body. */
  beginsStream({ ok, headers }) {
    this.hasStream = this.#isGeneration && ok && (headers.get("content-type") ?? "").startsWith(EVENTS_TYPE);
    if (!this.hasStream) return false;
    this.#cutter = new EventCutter();
    this.#held = "";
    this.#failure = undefined;
    if (this.#step !== RESUME) {
      this.#generationId = headers.get(GENERATION_ID) ?? undefined;
      this.#cursor = undefined;
    }
    this.#journal?.toldSeed(headers.get(SEED));
    return true;
  }

  /** The text that the user gets: whole events, each of them once. */
  feed(bytes) {
    return this.#cutter.feed(bytes).map((event) => this.#take(event)).join("");
  }

  #take(event) {
    if (this.isComplete || this.isBroken || event.data === undefined) return "";
    const isError = event.name === "error";
    if (isError && this.#heals(errorOf(event.data))) {
      this.#failure = event.raw;
      return "";
    }
    this.isComplete = isError || event.data.startsWith("[DONE]");
    if (event.id === undefined && this.#generationId !== undefined && !this.isComplete) {
      this.#held += event.raw; // Usage: it would come again if the end of the stream is lost.
      return "";
    }
    this.#cursor = event.id ?? this.#cursor;
    this.#journal?.add(jsonObject(event.data));
    this.#hasDelivered = true;
    this.#retries.progressed();
    const taken = this.#held + event.raw;
    this.#held = "";
    return taken;
  }

  #heals({ retryable, code }) {
    if (retryable !== true && code !== "SLOW_CLIENT") return false;
    return this.#generationId !== undefined || !this.#hasDelivered || this.#canContinue;
  }

  /** Whether the stream has ended with a failure from which the rest can be had. */
  get isBroken() {
    return this.#failure !== undefined;
  }

  /** The server has closed the stream. Undefined: that was its end, and the user gets `rest`. */
  closed() {
    if (!this.isComplete && (this.isBroken || this.#generationId !== undefined || this.#canContinue)) {
      return new TypeError("the stream has ended without its last event");
    }
    this.isComplete = true;
    return undefined;
  }

  /** The last text of the stream of another server, which ends as it likes. */
  rest() {
    return this.#held + this.#cutter.rest();
  }

  /** The stream has broken off. Undefined: give up. */
  broke() {
    this.#leave();
    return this.#turn() ? this.#retries.pauseMs({ freeCount: this.#addresses.count - 1 }) : undefined;
  }

  /** The event with which a stream ends that cannot go on. Throws `error` if no server has said why. */
  lastWords(error, response) {
    const told = response && jsonObject(response.text).error;
    if (!this.isBroken && !told) throw error;
    this.isComplete = true;
    return this.#failure ?? `event: error\ndata: ${JSON.stringify({ error: told })}\n\n`;
  }
}
