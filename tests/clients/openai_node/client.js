// The `openai` package with nothing changed but its base URL: `node client.js http://HOST:PORT/v1`.
//
// It prints a line of JSON for each thing that it tries.
import OpenAI from "openai";

const MODEL = "mocker";
const FULL_MODEL = "full"; // Its only worker takes one request at a time.
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

/** The models, and one of them. */
async function models() {
  const ids = [];
  for await (const { id } of client.models.list()) ids.push(id);
  const { id } = await client.models.retrieve(MODEL);
  tell("models", { ids, id });
}

/** An answer that came as a whole. */
function unary({ id, choices: [{ message, text, finish_reason }], usage }) {
  return { id, text: text ?? message.content, finish_reason, usage };
}

/** The answer of a stream; `begun` is called once ENOUGH pieces of it are there. */
async function whole(chunks, begun = () => {}) {
  const answer = { text: "" };
  let pieces = 0;
  for await (const { id, choices, usage } of chunks) {
    answer.id = id;
    if (usage) answer.usage = usage; // In the last chunk, which has no choice.
    for (const { delta, text, finish_reason } of choices) {
      answer.text += text ?? delta.content ?? "";
      answer.finish_reason = finish_reason;
      if (++pieces === ENOUGH) begun();
    }
  }
  return answer;
}

/** A request is called what the client calls it, and its name comes back beside the answer. */
async function named() {
  const options = { headers: { "X-Request-Id": "openai_node-named" } };
  const { data, request_id } = await chat.create({ ...QUESTION, max_tokens: ENOUGH }, options).withResponse();
  tell("named", { id: data.id, request_id, given: options.headers["X-Request-Id"] });
}

/** Asks what can't be answered. */
async function wrong() {
  tell("not_found", failure(await thrown(chat.create({ ...QUESTION, model: "nobody" }))));
  tell("bad_request", failure(await thrown(chat.create({ ...QUESTION, temperature: 3 }))));
}

/** Waits no longer than so; the worker stops within two steps. */
async function timeout() {
  const request_id = "openai_node-timeout";
  const options = { timeout: TIMEOUT_MS, maxRetries: 0, headers: { "X-Request-Id": request_id } };
  const error = await thrown(chat.create({ ...QUESTION, max_tokens: ENDLESS }, options));
  tell("timeout", { ...failure(error), request_id }); // The package heard nothing of the request, so it can't name it.
}

/** Lets the server take no longer than so. The package knows from the answer that it is no use to ask again. */
async function deadline() {
  const headers = { "X-Request-Id": "openai_node-deadline", "X-Request-Timeout": `${TIMEOUT_MS / 1_000}` };
  const error = await thrown(chat.create({ ...QUESTION, max_tokens: ENDLESS }, { headers }));
  tell("deadline", failure(error));
}

/** Leaves a stream after some pieces; the worker stops within two steps. */
async function abort() {
  const chunks = await chat.create({ ...QUESTION, ...STREAMED, max_tokens: ENDLESS });
  let pieces = 0;
  for await (const { id } of chunks) {
    if (++pieces < ENOUGH) continue;
    tell("abort", { id });
    break;
  }
}

/** Has its request cancelled by name, as somebody else might: a stream that has begun can fail, too. */
async function cancelled() {
  const request_id = "openai_node-cancelled";
  const options = { headers: { "X-Request-Id": request_id } };
  const chunks = await chat.create({ ...QUESTION, ...STREAMED, max_tokens: ENDLESS }, options);
  let cancelling;
  const error = await thrown(whole(chunks, () => (cancelling = client.post(`/requests/${request_id}/cancel`))));
  await cancelling;
  tell("cancelled", failure(error));
}

/** While one stream has all the room there is, another request is refused. */
async function refusal() {
  const holder = await chat.create({ ...QUESTION, ...STREAMED, model: FULL_MODEL, max_tokens: ENDLESS });
  const question = { ...QUESTION, model: FULL_MODEL, max_tokens: ENOUGH };
  tell("refusal", failure(await thrown(chat.create(question, { maxRetries: 0 }))));
  await retry(question, () => holder.controller.abort());
}

/** The package sends a refused request again by itself, when the answer said. `refused` makes room for it. */
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
  tell("retry", { attempts, finish_reason: choices[0].finish_reason });
}

/** The error that a request ends with. */
async function thrown(request) {
  try {
    await request;
  } catch (error) {
    if (error instanceof OpenAI.APIError) return error;
    throw error;
  }
  throw new Error("the request ended well");
}

/** What an error tells: a class for each kind, and `code` for programs. */
function failure({ constructor, status, code, param, requestID, headers }) {
  const retry_after = headers?.get("retry-after");
  return { error: constructor.name, status, code, param, request_id: requestID, retry_after };
}

/** Prints what came of a step. */
function tell(step, fields) {
  console.log(JSON.stringify({ step, ...fields }));
}

await models();
await Promise.all([
  chat.create(QUESTION).then((answer) => tell("unary", unary(answer))),
  chat.create({ ...QUESTION, ...STREAMED }).then(async (chunks) => tell("stream", await whole(chunks))),
  completions.create(PROMPT).then((answer) => tell("completion", unary(answer))),
  completions.create({ ...PROMPT, ...STREAMED }).then(async (chunks) => tell("completion_stream", await whole(chunks))),
  named(),
  wrong(),
  timeout(),
  deadline(),
  abort(),
  cancelled(),
  refusal(),
]);
// Whoever starts this kills the worker once it reads `begun`. Nothing here knows of it.
tell("lost_worker", await whole(await chat.create({ ...QUESTION, ...STREAMED }), () => tell("begun")));
