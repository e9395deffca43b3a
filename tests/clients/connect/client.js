// A client of Connect's stubs over gRPC: `node client.js HOST:PORT`. The stubs come from the published proto file, see buf.gen.yaml.
//
// It prints a line of JSON for each thing that it tries.
import { durationMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { FinishReason, FinishReasonSchema, Inference } from "./gen/unbroken/v1/inference_pb.js";

const MODEL = "mocker";
const FULL_MODEL = "full"; // Its only worker takes one request at a time.
const TOKENS = 120;
const ENDLESS = 100_000;
const ENOUGH = 5;
const DEADLINE_MS = 60_000;
const SHORT_DEADLINE_MS = 2_000;

const baseUrl = `http://${process.argv[2]}`;
const sessionManager = new Http2SessionManager(baseUrl); // Without it the transport makes one of its own.
const client = createClient(Inference, createGrpcTransport({ baseUrl, sessionManager }));

/** The stream broke a rule of inference.proto: what came is not the answer. */
class StreamIncomplete extends Error {}

/** Starts a request, which ends when `signal` aborts; `name` is for the logs. */
function generate(name, { model = MODEL, maxTokens = TOKENS, timeoutMs = DEADLINE_MS, signal } = {}) {
  const request = {
    model,
    prompt: { case: "text", value: "The moon" },
    sampling: { temperature: 0.8, seed: 7n },
    stop: { maxTokens, ignoreEos: true },
    requestId: `connect-${name}`,
  };
  return client.generate(request, { timeoutMs, signal });
}

/** The deltas of a stream with one choice. Throws StreamIncomplete if it breaks a rule, and ConnectError if its status is not OK. */
async function* deltas(responses) {
  let position = 0;
  let isComplete = false;
  for await (const { delta, completeFinal: isLast } of responses) {
    if (isComplete || Boolean(delta) === isLast) throw new StreamIncomplete("an item is either a delta or the last");
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

/** The answer of a stream; `begun` is called once ENOUGH tokens of it are there. */
async function whole(responses, begun = () => {}) {
  const answer = { token_ids: [], text: "", finish_reason: "" };
  for await (const delta of deltas(responses)) {
    const had = answer.token_ids.length;
    answer.token_ids.push(...delta.tokenIds);
    answer.text += delta.text;
    if (delta.finishReason !== FinishReason.UNSPECIFIED) {
      const known = FinishReasonSchema.value[delta.finishReason]; // A later server may have others.
      answer.finish_reason = known?.name ?? `${delta.finishReason}`;
    }
    if (had < ENOUGH && answer.token_ids.length >= ENOUGH) begun();
  }
  return answer;
}

/** Reads a stream that is not to end well: how many tokens came, calling `seen` with that, and the error. */
async function broken(responses, seen = () => {}) {
  let tokens = 0;
  try {
    for await (const delta of deltas(responses)) seen((tokens += delta.tokenIds.length));
  } catch (error) {
    if (!(error instanceof ConnectError)) throw error;
    return { tokens, error };
  }
  throw new Error("the stream ended well");
}

/** Leaves after some tokens; the worker stops within two steps. */
async function cancel() {
  const leaving = new AbortController();
  const { tokens, error } = await broken(
    generate("cancel", { maxTokens: ENDLESS, signal: leaving.signal }),
    (count) => count >= ENOUGH && leaving.abort(),
  );
  tell("cancel", { tokens, status: statusName(error) });
}

/** While one stream has all the room there is, another is refused: why, and when to come back. */
async function refusal() {
  const leaving = new AbortController();
  let begun;
  const hasBegun = new Promise((resolve) => (begun = resolve));
  const held = broken(generate("holder", { model: FULL_MODEL, maxTokens: ENDLESS, signal: leaving.signal }), begun);
  await hasBegun;
  const { error } = await broken(generate("refusal", { model: FULL_MODEL }));
  tell("refusal", { status: statusName(error), ...details(error) });
  leaving.abort();
  await held;
}

/** What a status carries: ErrorInfo, unless gRPC itself ended the rpc; RetryInfo where it is known when to retry. */
function details(error) {
  const [info] = error.findDetails(ErrorInfoSchema);
  const [retry] = error.findDetails(RetryInfoSchema);
  return {
    ...(info && { reason: info.reason, domain: info.domain, metadata: info.metadata }),
    ...(retry && { retry_after_s: durationMs(retry.retryDelay) / 1_000 }),
  };
}

/** Asks more than there is time for. */
async function deadline() {
  const { tokens, error } = await broken(generate("deadline", { maxTokens: ENDLESS, timeoutMs: SHORT_DEADLINE_MS }));
  tell("deadline", { tokens, status: statusName(error), ...details(error) });
}

/** A status as gRPC spells it: RESOURCE_EXHAUSTED, not ResourceExhausted. */
function statusName({ code }) {
  if (code === Code.Canceled) return "CANCELLED";
  return Code[code].replace(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase();
}

/** Prints what came of a step. */
function tell(step, fields = {}) {
  console.log(JSON.stringify({ step, ...fields }));
}

tell("stream", await whole(generate("stream")));
await cancel();
await refusal();
await deadline();
// Whoever starts this kills the worker once it reads `begun`. Nothing here knows of it.
tell("lost_worker", await whole(generate("lost_worker"), () => tell("begun")));
sessionManager.abort();
