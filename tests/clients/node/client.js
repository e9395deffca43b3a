// A gRPC client that needs nothing but the published proto file: `node client.js --proto FOLDER HOST:PORT
// [HOST:PORT]`.
//
// FOLDER contains unbroken/v1/inference.proto, which is read at start; the default is `proto`.
//
// It prints a line of JSON for each step. With the addresses of two frontends, it only loses the first one: see resume.js.
import { createRequire } from "node:module";
import path from "node:path";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { generate as generateKept } from "./resume.js";

const MODEL = "mocker";
const FULL_MODEL = "full"; // The only worker of this model runs one request at a time.
const TOKENS = 120;
const ENDLESS = 100_000;
const ENOUGH = 5;
const DEADLINE_MS = 60_000;
const SHORT_DEADLINE_MS = 2_000;

const {
  values: { proto: protoFolder },
  positionals: addresses,
} = parseArgs({ allowPositionals: true, options: { proto: { type: "string", default: "proto" } } });
const googleFolder = path.dirname(createRequire(import.meta.url).resolve("google-proto-files/package.json"));
const proto = grpc.loadPackageDefinition(
  protoLoader.loadSync(["unbroken/v1/inference.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"], {
    includeDirs: [protoFolder, googleFolder],
    keepCase: true,
    enums: String,
    longs: String,
    defaults: true,
  }),
);
const clients = addresses.map((address) => new proto.unbroken.v1.Inference(address, grpc.credentials.createInsecure()));
const [client] = clients;

/** The stream broke a rule of inference.proto, so what was received is not the answer. */
class StreamIncomplete extends Error {}

/** Returns a request. `name` becomes its request id, which the logs show. */
const requestOf = (name, { model = MODEL, maxTokens = TOKENS } = {}) => ({
  model,
  text: "The moon",
  sampling: { temperature: 0.8, seed: 7 },
  stop: { max_tokens: maxTokens, ignore_eos: true },
  request_id: `node-${name}`,
});

/** Starts a request. */
function generate(name, { deadlineMs = DEADLINE_MS, ...options } = {}) {
  return client.generate(requestOf(name, options), { deadline: Date.now() + deadlineMs });
}

/** Yields the deltas of a stream with one choice. Throws StreamIncomplete if it breaks a rule, or its status if that is not OK. */
async function* deltas(responses) {
  let position = 0;
  let isComplete = false;
  for await (const { delta, complete_final: isLast } of responses) {
    if (isComplete || Boolean(delta) === isLast) throw new StreamIncomplete("an item must be either a delta or the final marker");
    isComplete = isLast;
    if (isComplete) continue;
    if (delta.token_ids.length && delta.position !== position) {
      throw new StreamIncomplete(`position ${delta.position} follows ${position}`);
    }
    position += delta.token_ids.length;
    yield delta;
  }
  if (!isComplete) throw new StreamIncomplete("the stream was cut off");
}

/** Reads a stream to its end and returns the answer. Calls `begun` once ENOUGH tokens have arrived. */
async function readAnswer(responses, begun = () => {}) {
  const answer = { token_ids: [], text: "", finish_reason: "" };
  for await (const delta of deltas(responses)) {
    const had = answer.token_ids.length;
    answer.token_ids.push(...delta.token_ids);
    answer.text += delta.text;
    if (delta.finish_reason !== "FINISH_REASON_UNSPECIFIED") answer.finish_reason = delta.finish_reason;
    if (had < ENOUGH && answer.token_ids.length >= ENOUGH) begun();
  }
  return answer;
}

/** Reads a stream that must fail. Calls `seen` with the number of tokens so far; returns that number and the status. */
async function readFailure(responses, seen = () => {}) {
  let tokens = 0;
  try {
    for await (const delta of deltas(responses)) seen((tokens += delta.token_ids.length));
  } catch (error) {
    if (error.code === undefined) throw error;
    return { tokens, error };
  }
  throw new Error("the stream ended without an error");
}

/** Cancels the rpc after some tokens. The worker stops within two steps. */
async function cancel() {
  const responses = generate("cancel", { maxTokens: ENDLESS });
  let isCancelled = false;
  const { tokens, error } = await readFailure(responses, (count) => {
    if (count < ENOUGH || isCancelled) return;
    isCancelled = true;
    responses.cancel();
  });
  report("cancel", { tokens, status: grpc.status[error.code] });
}

/** Sends a request while another stream holds the only slot. The refusal says why, and when to retry. */
async function refusal() {
  const holder = generate("holder", { model: FULL_MODEL, maxTokens: ENDLESS });
  let begun;
  const hasBegun = new Promise((resolve) => (begun = resolve));
  const held = readFailure(holder, begun);
  await hasBegun;
  const { error } = await readFailure(generate("refusal", { model: FULL_MODEL }));
  report("refusal", { status: grpc.status[error.code], ...details(error) });
  holder.cancel();
  await held;
}

/** Returns the details of a status: ErrorInfo, unless gRPC itself ended the rpc; RetryInfo if the server knows when to retry. */
function details(error) {
  const found = {};
  const [bytes] = error.metadata.get("grpc-status-details-bin");
  if (bytes === undefined) return found;
  for (const { type_url: url, value } of decode("Status", bytes).details) {
    const type = url.split("/").at(-1);
    if (type === "google.rpc.ErrorInfo") {
      const { reason, domain, metadata } = decode("ErrorInfo", value);
      Object.assign(found, { reason, domain, metadata });
    } else if (type === "google.rpc.RetryInfo") {
      const { seconds, nanos } = decode("RetryInfo", value).retry_delay;
      found.retry_after_s = Number(seconds) + nanos / 1e9;
    }
  }
  return found;
}

/** Decodes a message of google.rpc. */
function decode(name, bytes) {
  return proto.google.rpc[name].deserialize(bytes);
}

/** Requests more tokens than the deadline allows. */
async function deadline() {
  const { tokens, error } = await readFailure(generate("deadline", { maxTokens: ENDLESS, deadlineMs: SHORT_DEADLINE_MS }));
  report("deadline", { tokens, status: grpc.status[error.code], ...details(error) });
}

/** Loses its frontend: the test that runs this program kills the first one when it reads `begun`. */
async function lostFrontend() {
  const options = { deadline: Date.now() + DEADLINE_MS, details };
  const request = requestOf("lost_frontend");
  report("undisturbed", await readAnswer(generateKept(clients.slice(1), request, options)));
  report("resumed", await readAnswer(generateKept(clients, request, options), () => report("begun")));
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
for (const one of clients) one.close();
