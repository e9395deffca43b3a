/** The tokens of an answer that the client has. Kept for streams whose user asks for `return_token_ids`. */
export class Journal {
  #body;
  #isChat;
  #seed;
  #tokens;
  #isEnded;

  /** `body`: of the request. */
  constructor(body, isChat) {
    this.#body = body;
    this.#isChat = isChat;
    const count = choiceCount(body);
    const brought = body.generated_token_ids;
    const isFlat = count === 1 && Array.isArray(brought) && brought.every((token) => typeof token === "number");
    const perChoice = isFlat ? [brought] : brought;
    const isBrought = Array.isArray(perChoice) && perChoice.length === count;
    this.#tokens = Array.from({ length: count }, (_, index) => [...((isBrought && perChoice[index]) || [])]);
    this.#isEnded = Array.from({ length: count }, (_, index) => isBrought && perChoice[index] === null);
  }

  /**
   * Whether the rest of the answer can be had with these tokens. Not if the draws are unknown, nor with the log
   * probabilities of completions, which come later than the tokens.
   */
  get canContinue() {
    const { seed, temperature, logprobs } = this.#body;
    const hasDraws = this.#seed !== undefined || (seed ?? null) !== null || temperature === 0;
    return hasDraws && !this.#isEnded.every(Boolean) && (this.#isChat || (logprobs ?? null) === null);
  }

  /** The server has used this seed. */
  toldSeed(seed) {
    if (/^\d+$/.test(seed ?? "")) this.#seed = seed;
  }

  /** Note the tokens in the data of an event. */
  add({ choices }) {
    for (const { index = 0, token_ids, finish_reason } of choices ?? []) {
      if (index >= this.#tokens.length) continue;
      this.#tokens[index].push(...(token_ids ?? []));
      this.#isEnded[index] ||= (finish_reason ?? null) !== null;
    }
  }

  /** The body of the request for the rest. The seed is written as it was told: it may be too large for a number. */
  continuation() {
    const tokens = this.#tokens.map((ids, index) => (this.#isEnded[index] ? null : ids));
    const { seed, ...body } = { ...this.#body, generated_token_ids: tokens.length === 1 ? tokens[0] : tokens };
    const used = this.#seed ?? (seed === undefined ? undefined : JSON.stringify(seed));
    return used === undefined ? JSON.stringify(body) : JSON.stringify(body).replace(/}$/, `,"seed":${used}}`);
  }
}

function choiceCount({ n, prompt }) {
  const areSeveral = Array.isArray(prompt) && (typeof prompt[0] === "string" || Array.isArray(prompt[0]));
  return (areSeveral ? prompt.length : 1) * (Number.isInteger(n) && n > 0 ? n : 1);
}
