// A gRPC client with Connect's stubs: `node client.js [--web] HOST:PORT [HOST:PORT]`. See buf.gen.yaml for how to generate the
// stubs from the published proto file. With --web it is a client of gRPC-Web over HTTP/1.1, as a page is.
//
// It prints a line of JSON for each step. With the addresses of two frontends, it only loses the first one: see resume.js.
import { durationMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { FinishReason, FinishReasonSchema, Inference } from "./gen/unbroken/v1/inference_pb.js";
import { generate as generateKept } from "./resume.js";

const MODEL = "mocker";
const FULL_MODEL = "full"; // The only worker of this model runs one request at a time.
const TOKENS = 120;
const ENDLESS = 100_000;
const ENOUGH = 5;
const DEADLINE_MS = 60_000;
const SHORT_DEADLINE_MS = 2_000;

const isWeb = process.argv[2] === "--web";
const urls = process.argv.slice(isWeb ? 3 : 2).map((address) => `http://${address}`);
const sessionManagers = urls.map((url) => new Http2SessionManager(url)); // Passed in so that they can be closed at the end.
const transports = urls.map((baseUrl, index) =>
  isWeb ? createGrpcWebTransport({ baseUrl }) : createGrpcTransport({ baseUrl, sessionManager: sessionManagers[index] }),
);
const clients = transports.map((transport) => createClient(Inference, transport));
const [client] = clients;

/** The stream broke a rule of inference.proto, so what was received is not the answer. */
class StreamIncomplete extends Error {}

/** Returns a request. `name` becomes its request id, which the logs show. */
const requestOf = (name, { model = MODEL, maxTokens = TOKENS } = {}) => ({
  model,
  prompt: { case: "text", value: "The moon" },
  sampling: { temperature: 0.8, seed: 7n },
  stop: { maxTokens, ignoreEos: true },
  requestId: `connect-${name}`,
});

/** Starts a request, which ends when `signal` aborts. */
function generate(name, { timeoutMs = DEADLINE_MS, signal, ...options } = {}) {
  return client.generate(requestOf(name, options), { timeoutMs, signal });
}

/** Yields the deltas of a stream with one choice. Throws StreamIncomplete if it breaks a rule, or ConnectError if its status is not OK. */
async function* deltas(responses) {
  let position = 0;
  let isComplete = false;
  for await (const { delta, completeFinal: isLast } of responses) {
    if (isComplete || Boolean(delta) === isLast) throw new StreamIncomplete("an item must be either a delta or the final marker");
    isComplete = isLast;
    if (isComplete) continue;
    if (delta.tokenIds.length && delta.position !== position) {
      throw new StreamIncomplete(`position ${delta.position} follows ${position}`);
    }
    position += delta.tokenIds.length;
    yield delta;
  }
  if (!isComplete) throw new StreamIncomplete("the stream was cut off");
}

/** Reads a stream to its end and returns the answer. Calls `begun` once ENOUGH tokens have arrived. */
async function readAnswer(responses, begun = () => {}) {
  const answer = { token_ids: [], text: "", finish_reason: "" };
  for await (const delta of deltas(responses)) {
    const had = answer.token_ids.length;
    answer.token_ids.push(...delta.tokenIds);
    answer.text += delta.text;
    if (delta.finishReason !== FinishReason.UNSPECIFIED) {
      const known = FinishReasonSchema.value[delta.finishReason]; // A newer server may send others.
      answer.finish_reason = known?.name ?? `${delta.finishReason}`;
    }
    if (had < ENOUGH && answer.token_ids.length >= ENOUGH) begun();
  }
  return answer;
}

/** Reads a stream that must fail. Calls `seen` with the number of tokens so far; returns that number and the error. */
async function readFailure(responses, seen = () => {}) {
  let tokens = 0;
  try {
    for await (const delta of deltas(responses)) seen((tokens += delta.tokenIds.length));
  } catch (error) {
    if (!(error instanceof ConnectError)) throw error;
    return { tokens, error };
  }
  throw new Error("the stream ended without an error");
}

/** Cancels the rpc after some tokens. The worker stops within two steps. */
async function cancel() {
  const leaving = new AbortController();
  const { tokens, error } = await readFailure(
    generate("cancel", { maxTokens: ENDLESS, signal: leaving.signal }),
    (count) => count >= ENOUGH && leaving.abort(),
  );
  report("cancel", { tokens, status: statusName(error) });
}

/** Sends a request while another stream holds the only slot. The refusal says why, and when to retry. */
async function refusal() {
  const leaving = new AbortController();
  let begun;
  const hasBegun = new Promise((resolve) => (begun = resolve));
  const held = readFailure(generate("holder", { model: FULL_MODEL, maxTokens: ENDLESS, signal: leaving.signal }), begun);
  await hasBegun;
  const { error } = await readFailure(generate("refusal", { model: FULL_MODEL }));
  report("refusal", { status: statusName(error), ...details(error) });
  leaving.abort();
  await held;
}

/** Returns the details of a status: ErrorInfo, unless gRPC itself ended the rpc; RetryInfo if the server knows when to retry. */
function details(error) {
  const [info] = error.findDetails(ErrorInfoSchema);
  const [retry] = error.findDetails(RetryInfoSchema);
  return {
    ...(info && { reason: info.reason, domain: info.domain, metadata: info.metadata }),
    ...(retry && { retry_after_s: durationMs(retry.retryDelay) / 1_000 }),
  };
}

/** Requests more tokens than the deadline allows. */
async function deadline() {
  const { tokens, error } = await readFailure(generate("deadline", { maxTokens: ENDLESS, timeoutMs: SHORT_DEADLINE_MS }));
  report("deadline", { tokens, status: statusName(error), ...details(error) });
}

/** Loses its frontend: the test that runs this program kills the first one when it reads `begun`. */
async function lostFrontend() {
  const deadline = Date.now() + DEADLINE_MS;
  const request = requestOf("lost_frontend");
  report("undisturbed", await readAnswer(generateKept(clients.slice(1), request, deadline)));
  report("resumed", await readAnswer(generateKept(clients, request, deadline), () => report("begun")));
}

/** Returns a status code as gRPC spells it: RESOURCE_EXHAUSTED, not ResourceExhausted. */
function statusName({ code }) {
  if (code === Code.Canceled) return "CANCELLED";
  return Code[code].replace(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase();
}

/** Prints the result of a step. */
function report(step, fields = {}) {
  console.log(JSON.stringify({ step, ...fields }));
}

if (clients.length > 1) {
  await lostFrontend();
} else {
  report("stream", await readAnswer(generate("stream")));
  await cancel();
  await refusal();
  await deadline();
  // The test that runs this program kills the worker when it reads `begun`. The client needs no code for that.
  report("lost_worker", await readAnswer(generate("lost_worker"), () => report("begun")));
}
for (const manager of sessionManagers) manager.abort();
