// The `openai` package with only its base URL changed: `node client.js http://HOST:PORT/v1`.
//
// It prints a line of JSON for each step.
import OpenAI from "openai";

const MODEL = "mocker";
const FULL_MODEL = "full"; // The only worker of this model runs one request at a time.
const TOKENS = 120;
const ENDLESS = 100_000;
const ENOUGH = 5;
const TIMEOUT_MS = 2_000;
const DRAWN = { model: MODEL, max_tokens: TOKENS, temperature: 0.8, seed: 8 };
const QUESTION = { ...DRAWN, messages: [{ role: "user", content: "Why does the moon have phases?" }] };
const PROMPT = { ...DRAWN, prompt: "The moon" };
const STREAMED = { stream: true, stream_options: { include_usage: true } };

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none" });
const { completions } = client;
const chat = client.chat.completions;

/** Lists the models, and retrieves one of them. */
async function models() {
  const ids = [];
  for await (const { id } of client.models.list()) ids.push(id);
  const { id } = await client.models.retrieve(MODEL);
  report("models", { ids, id });
}

/** Returns the fields of a unary answer to report. */
function summarize({ id, choices: [{ message, text, finish_reason }], usage }) {
  return { id, text: text ?? message.content, finish_reason, usage };
}

/** Reads a stream to its end and returns the answer. Calls `begun` once ENOUGH chunks have arrived. */
async function readAnswer(chunks, begun = () => {}) {
  const answer = { text: "" };
  let pieces = 0;
  for await (const { id, choices, usage } of chunks) {
    answer.id = id;
    if (usage) answer.usage = usage; // Only the last chunk has it, and no choice.
    for (const { delta, text, finish_reason } of choices) {
      answer.text += text ?? delta.content ?? "";
      answer.finish_reason = finish_reason;
      if (++pieces === ENOUGH) begun();
    }
  }
  return answer;
}

/** Sets the request id. The server returns it as a header and as a part of the answer's id. */
async function named() {
  const options = { headers: { "X-Request-Id": "openai_node-named" } };
  const { data, request_id } = await chat.create({ ...QUESTION, max_tokens: ENOUGH }, options).withResponse();
  report("named", { id: data.id, request_id, given: options.headers["X-Request-Id"] });
}

/** Sends requests that cannot be served. */
async function badRequests() {
  report("not_found", describeError(await thrown(chat.create({ ...QUESTION, model: "nobody" }))));
  report("bad_request", describeError(await thrown(chat.create({ ...QUESTION, temperature: 3 }))));
}

/** Sets a timeout in the client. When it passes, the worker stops within two steps. */
async function timeout() {
  const request_id = "openai_node-timeout";
  const options = { timeout: TIMEOUT_MS, maxRetries: 0, headers: { "X-Request-Id": request_id } };
  const error = await thrown(chat.create({ ...QUESTION, max_tokens: ENDLESS }, options));
  report("timeout", { ...describeError(error), request_id }); // The package received no response, so it knows no request id.
}

/** Sets a deadline for the server. Its response tells the package not to retry. */
async function deadline() {
  const headers = { "X-Request-Id": "openai_node-deadline", "X-Request-Timeout": `${TIMEOUT_MS / 1_000}` };
  const error = await thrown(chat.create({ ...QUESTION, max_tokens: ENDLESS }, { headers }));
  report("deadline", describeError(error));
}

/** Closes a stream after some chunks. The worker stops within two steps. */
async function abort() {
  const chunks = await chat.create({ ...QUESTION, ...STREAMED, max_tokens: ENDLESS });
  let pieces = 0;
  for await (const { id } of chunks) {
    if (++pieces < ENOUGH) continue;
    report("abort", { id });
    break;
  }
}

/** Cancels a request by its id, as another client could. A stream that has begun then ends with an error. */
async function cancelled() {
  const request_id = "openai_node-cancelled";
  const options = { headers: { "X-Request-Id": request_id } };
  const chunks = await chat.create({ ...QUESTION, ...STREAMED, max_tokens: ENDLESS }, options);
  let cancelling;
  const error = await thrown(readAnswer(chunks, () => (cancelling = client.post(`/requests/${request_id}/cancel`))));
  await cancelling;
  report("cancelled", describeError(error));
}

/** Sends a request while another stream holds the only slot. */
async function refusal() {
  const holder = await chat.create({ ...QUESTION, ...STREAMED, model: FULL_MODEL, max_tokens: ENDLESS });
  const question = { ...QUESTION, model: FULL_MODEL, max_tokens: ENOUGH };
  report("refusal", describeError(await thrown(chat.create(question, { maxRetries: 0 }))));
  await retry(question, () => holder.controller.abort());
}

/** Lets the package retry a refused request after the delay that the server named. `refused` frees the slot. */
async function retry(question, refused) {
  const attempts = [];
  const watched = client.withOptions({
    fetch: async (...request) => {
      const response = await fetch(...request);
      const retry_after_s = Number(response.headers.get("retry-after-ms")) / 1_000;
      attempts.push({ status: response.status, at_s: performance.now() / 1_000, retry_after_s });
      refused();
      return response;
    },
  });
  const { choices } = await watched.chat.completions.create(question);
  report("retry", { attempts, finish_reason: choices[0].finish_reason });
}

/** Returns the error with which a request ends. */
async function thrown(request) {
  try {
    await request;
  } catch (error) {
    if (error instanceof OpenAI.APIError) return error;
    throw error;
  }
  throw new Error("the request ended without an error");
}

/** Returns what an error says: its class, and `code` for programs. */
function describeError({ constructor, status, code, param, requestID, headers }) {
  const retry_after = headers?.get("retry-after");
  return { error: constructor.name, status, code, param, request_id: requestID, retry_after };
}

/** Prints the result of a step. */
function report(step, fields) {
  console.log(JSON.stringify({ step, ...fields }));
}

await models();
await Promise.all([
  chat.create(QUESTION).then((answer) => report("unary", summarize(answer))),
  chat.create({ ...QUESTION, ...STREAMED }).then(async (chunks) => report("stream", await readAnswer(chunks))),
  completions.create(PROMPT).then((answer) => report("completion", summarize(answer))),
  completions.create({ ...PROMPT, ...STREAMED }).then(async (chunks) => report("completion_stream", await readAnswer(chunks))),
  named(),
  badRequests(),
  timeout(),
  deadline(),
  abort(),
  cancelled(),
  refusal(),
]);
// The test that runs this program kills the worker when it reads `begun`. The client needs no code for that.
report("lost_worker", await readAnswer(await chat.create({ ...QUESTION, ...STREAMED }), () => report("begun")));
