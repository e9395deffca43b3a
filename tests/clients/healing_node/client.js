// The `openai` package with the fetch of `unbroken-client`: `node client.js STEP URL URL`.
//
// It prints a line of JSON for each of two answers: `undisturbed`, from the second server, and `healed`. The test that
// runs this program kills the first server when it reads `begun`. The steps have no code for that.
import OpenAI from "openai";
import { unbrokenFetch } from "unbroken-client";

const ENOUGH = 5;
const SILENCE_MS_MAX = 5_000;
const QUESTION = {
  model: "mocker",
  messages: [{ role: "user", content: "Why does the moon have phases?" }],
  max_tokens: 120,
  temperature: 0.8,
  seed: 8,
  n: 2,
};
const STREAMED = { stream: true, stream_options: { include_usage: true } };

const clientOf = (urls, policy) =>
  new OpenAI({ baseURL: `${urls[0]}/v1`, apiKey: "none", maxRetries: 0, fetch: unbrokenFetch(urls, { policy }) });

/** Reads a stream. Calls `begun` once ENOUGH chunks have arrived. `more`: further fields of the request. `policy`: of the fetch. */
async function stream(urls, begun, more = {}, policy = {}) {
  const answer = { texts: ["", ""], finish_reasons: [null, null], usage: null };
  let count = 0;
  const asked = { ...QUESTION, ...STREAMED, ...more };
  for await (const { choices, usage } of await clientOf(urls, policy).chat.completions.create(asked)) {
    for (const { index, delta, finish_reason } of choices) {
      answer.texts[index] += delta.content ?? "";
      answer.finish_reasons[index] = finish_reason;
    }
    answer.usage = usage ?? answer.usage;
    if (++count === ENOUGH) begun();
  }
  return answer;
}

/** Waits for a whole answer. */
async function whole(urls, begun) {
  begun();
  const { choices, usage } = await clientOf(urls).chat.completions.create(QUESTION);
  const texts = choices.map(({ message }) => message.content);
  return { texts, finish_reasons: choices.map(({ finish_reason }) => finish_reason), usage };
}

/** Reads a stream with its token ids, so that it goes on although all workers are lost. */
const withTokens = (urls, begun) => stream(urls, begun, { return_token_ids: true });

/** Reads a stream, and leaves a server that is silent for too long. */
const watched = (urls, begun) => stream(urls, begun, {}, { silenceMsMax: SILENCE_MS_MAX });

/** Ends a stream after its first chunk. */
async function leave(urls) {
  const asked = { ...QUESTION, max_tokens: 100_000, stream: true };
  for await (const { id } of await clientOf(urls).chat.completions.create(asked)) {
    report("left", { id });
    break;
  }
}

/** Prints the result of a step. */
const report = (step, fields) => console.log(JSON.stringify({ step, ...fields }));

const [step, first, second] = process.argv.slice(2);
if (step === "left") {
  await leave([second]);
} else {
  const run = { stream, whole, lost_plane: withTokens, frozen: watched }[step];
  report("undisturbed", await run([second], () => {}));
  report("healed", await run([first, second], () => report("begun")));
}
