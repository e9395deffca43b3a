const POLICY = { baseMs: 250, capMs: 8_000, retriesMax: 20, deadlineMs: 600_000, sleepShareMax: 0.4 };

/** The retries of one request: full jitter, within the deadline, with a bound on the time slept. */
export class Retries {
  #policy;
  #timeoutMs;
  #isAbsolute;
  #clock;
  #draw;
  #deadline;
  #sleptMs = 0;
  #count = 0;

  /** `timeoutMs`: set by the user, so that it does not count anew from each event; undefined: the policy's deadline. */
  constructor(policy, timeoutMs, clock = () => performance.now(), draw = Math.random) {
    this.#policy = { ...POLICY, ...policy };
    this.#timeoutMs = timeoutMs ?? this.#policy.deadlineMs;
    this.#isAbsolute = timeoutMs !== undefined;
    this.#clock = clock;
    this.#draw = draw;
    this.#deadline = clock() + this.#timeoutMs;
  }

  /** The time until the deadline. */
  get remainingMs() {
    return this.#deadline - this.#clock();
  }

  /** A part of the answer has arrived. */
  progressed() {
    this.#count = 0;
    if (!this.#isAbsolute) this.#deadline = this.#clock() + this.#timeoutMs;
  }

  /**
   * How long to sleep before the next attempt; undefined: give up.
   *
   * `atLeastMs`: what the server asks for. `freeCount`: the first retries, which need no pause, as each goes to another
   * server.
   */
  pauseMs({ atLeastMs = 0, freeCount = 0 } = {}) {
    const { baseMs, capMs, retriesMax, sleepShareMax } = this.#policy;
    if (this.#count >= retriesMax) return undefined;
    const jitterMs = this.#draw() * Math.min(capMs, baseMs * 2 ** this.#count);
    const pauseMs = Math.max(atLeastMs, this.#count < freeCount ? 0 : jitterMs);
    if (this.#sleptMs + pauseMs > sleepShareMax * this.#timeoutMs || pauseMs >= this.remainingMs) return undefined;
    this.#count += 1;
    this.#sleptMs += pauseMs;
    return pauseMs;
  }
}
