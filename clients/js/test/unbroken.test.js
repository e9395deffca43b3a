// The fetch goes on with an answer on another server, and sends again what may be sent again.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Retries } from "../src/retries.js";
import { unbrokenFetch } from "../src/index.js";

const URLS = ["http://first:8000", "http://second:8000/v1"];
const PATH = "/v1/chat/completions";
const ID = "0123456789abcdef0123456789abcdef";
const KEPT = { "content-type": "text/event-stream", "x-unbroken-generation-id": ID, "x-unbroken-seed": "9007199254740993" };
const DONE = "data: [DONE]\n\n";
const CHAT = { model: "m", messages: [], stream: true };
const SEND_1 = `POST first ${PATH}`;
const SEND_2 = `POST second ${PATH}`;
const RESUME_1 = `GET first /v1/streams/${ID}`;
const RESUME_2 = `GET second /v1/streams/${ID}`;

const cut = () => new TypeError("terminated");
const refused = () => new TypeError("fetch failed", { cause: { code: "ECONNREFUSED" } });

function event(text, cursor, fields = {}) {
  const choice = { index: 0, delta: { content: text }, finish_reason: null, ...fields };
  return `${cursor === undefined ? "" : `id: ${cursor}\n`}data: ${JSON.stringify({ choices: [choice] })}\n\n`;
}

/** A stream of events in these pieces. An error among them breaks the connection there. */
function stream(pieces, headers = KEPT) {
  const rest = pieces.map((piece) => (typeof piece === "string" ? new TextEncoder().encode(piece) : piece));
  const body = new ReadableStream(
    {
      pull(controller) {
        const piece = rest.shift();
        if (piece === undefined) controller.close();
        else if (piece instanceof Error) controller.error(piece);
        else controller.enqueue(piece);
      },
    },
    { highWaterMark: 0 },
  );
  return new Response(body, { headers });
}

const failed = (status, code, retryable, headers = {}) => Response.json({ error: { code, retryable } }, { status, headers });
const failure = (code, retryable) => `event: error\ndata: ${JSON.stringify({ error: { code, retryable } })}\n\n`;
const gone = () => failed(404, "STREAM_NOT_FOUND", false);

/** A plane that answers each request with the next take. */
function planeOf(...takes) {
  const plane = { requests: [], cancels: [] };
  plane.fetch = async (url, init) => {
    const request = new Request(url, init);
    request.content = request.method === "GET" ? "" : await request.text();
    if (request.url.endsWith("/cancel")) {
      plane.cancels.push(new URL(request.url).pathname);
      return new Response();
    }
    plane.requests.push(request);
    const take = takes.shift();
    if (take instanceof Error) throw take;
    return take;
  };
  plane.asked = () =>
    plane.requests.map(({ method, url }) => `${method} ${new URL(url).hostname} ${new URL(url).pathname}`);
  return plane;
}

function ask(plane, { body = CHAT, headers = {}, signal, policy = {} } = {}) {
  const fetch = unbrokenFetch(URLS, { fetch: plane.fetch, policy: { baseMs: 0, ...policy } });
  const named = { "x-request-id": ID, ...headers };
  return fetch(URLS[0] + PATH, { method: "POST", body: JSON.stringify(body), headers: named, signal });
}

const textOf = async (plane, options) => (await ask(plane, options)).text();

test("a request asks to be kept under an id of its own", async () => {
  const plane = planeOf(stream([event("a", "1-0"), DONE]), stream([event("a", "1-0"), DONE]));
  await textOf(plane, { headers: { "x-request-id": "" } });
  await textOf(plane, { headers: { "x-request-id": "mine", "x-on-disconnect": "cancel" } });
  const [first, second] = plane.requests.map(({ headers }) => headers);
  assert.match(first.get("x-request-id"), /^[0-9a-f]{32}$/);
  assert.equal(first.get("x-on-disconnect"), "continue");
  assert.equal(second.get("x-request-id"), "mine");
  assert.equal(second.get("x-on-disconnect"), "cancel");
});

for (const [name, end] of [["breaks", cut()], ["drains", failure("DRAINING", true)], ["ends too early"]]) {
  test(`a stream that ${name} goes on after the last whole event`, async () => {
    const begun = event("a", "1-0") + event("b", "2-0");
    const half = typeof end === "string" ? "" : event("c", "3-0").slice(0, 20);
    const plane = planeOf(stream([begun + half, ...(end ? [end] : [])]), stream([event("c", "3-0"), DONE]));
    assert.equal(await textOf(plane), begun + event("c", "3-0") + DONE);
    assert.deepEqual(plane.asked(), [SEND_1, RESUME_2]);
    assert.equal(plane.requests[1].headers.get("last-event-id"), "2-0");
    assert.deepEqual(plane.cancels, []);
  });
}

test("events are whole however their bytes arrive", async () => {
  const sent = "retry: 1000\n" + event("ü", "1-0") + event("b", "2-0") + DONE;
  const bytes = Array.from(new TextEncoder().encode(sent), (byte) => new Uint8Array([byte]));
  assert.equal(await textOf(planeOf(stream(bytes))), sent);
});

test("usage comes once if the end of the stream is lost", async () => {
  const usage = 'data: {"choices": [], "usage": {}}\n\n';
  const last = event("a", "1e-0");
  assert.equal(await textOf(planeOf(stream([last + usage, cut()]), stream([usage + DONE]))), last + usage + DONE);
});

test("the server of a stream that is silent for too long is left", async () => {
  const silent = new Response(
    new ReadableStream({
      start: (controller) => controller.enqueue(new TextEncoder().encode(event("a", "1-0"))),
      pull: () => new Promise(() => {}),
    }),
    { headers: KEPT },
  );
  const plane = planeOf(silent, stream([event("b", "2-0"), DONE]));
  assert.equal(await textOf(plane, { policy: { silenceMsMax: 20 } }), event("a", "1-0") + event("b", "2-0") + DONE);
  assert.deepEqual(plane.asked(), [SEND_1, RESUME_2]);
  assert.ok(plane.requests[0].signal.aborted);
});

test("a server that does not begin a stream is left", async () => {
  const plane = planeOf(new Promise(() => {}), stream([event("a", "1-0"), DONE]));
  assert.equal(await textOf(plane, { policy: { silenceMsMax: 20 } }), event("a", "1-0") + DONE);
  assert.deepEqual(plane.asked(), [SEND_1, RESUME_2]);
});

test("a stream that breaks again goes on again", async () => {
  const plane = planeOf(
    stream([event("a", "1-0"), cut()]),
    refused(),
    stream([event("b", "2-0"), cut()]),
    stream([event("c", "3-0"), DONE]),
  );
  assert.equal(await textOf(plane), event("a", "1-0") + event("b", "2-0") + event("c", "3-0") + DONE);
  assert.deepEqual(plane.asked(), [SEND_1, RESUME_2, RESUME_1, RESUME_2]);
});

test("an answer that the plane has lost is asked for anew if the user has nothing of it", async () => {
  const plane = planeOf(stream([cut()]), gone(), stream([event("a", "1-0"), DONE]));
  assert.equal(await textOf(plane), event("a", "1-0") + DONE);
  assert.deepEqual(plane.asked(), [SEND_1, RESUME_2, SEND_2]);
  assert.equal(plane.requests[2].headers.get("x-request-id"), ID);
});

test("the user is told that the plane has lost the answer", async () => {
  assert.match(await textOf(planeOf(stream([event("a", "1-0"), cut()]), gone())), /event: error\ndata: .*STREAM_NOT_FOUND/);
});

test("the first failure is told rather than what came of the resume", async () => {
  const sent = event("a", "1-0") + failure("DISCONNECTED", true);
  assert.equal(await textOf(planeOf(stream([sent]), gone())), sent);
  assert.equal(await textOf(planeOf(stream([sent]), ...Array.from({ length: 20 }, refused))), sent);
});

test("a failure that nobody can mend reaches the user", async () => {
  const sent = event("a", "1-0") + failure("POISON_REQUEST", false);
  const plane = planeOf(stream([sent]));
  assert.equal(await textOf(plane), sent);
  assert.deepEqual(plane.asked(), [SEND_1]);
});

test("the stream of another server passes through and ends as it likes", async () => {
  const sent = event("a") + event("b");
  assert.equal(await textOf(planeOf(stream([sent], { "content-type": "text/event-stream" }))), sent);
});

test("a lost answer goes on with the tokens and the seed if they are known", async () => {
  const begun = event("a", "1-0", { token_ids: [5] }) + event("b", "3-0", { token_ids: [6, 7] });
  const last = event("c", "4-0", { token_ids: [8] });
  const plane = planeOf(stream([begun, cut()]), gone(), stream([last, DONE]));
  const body = { ...CHAT, return_token_ids: true };
  assert.equal(await textOf(plane, { body }), begun + last + DONE);
  const { content } = plane.requests[2];
  assert.deepEqual(JSON.parse(content).generated_token_ids, [5, 6, 7]);
  assert.match(content, /"seed":9007199254740993}$/);
});

test("the tokens of several choices are sent as lists", async () => {
  const begun = event("a", "1.0-0", { token_ids: [5], finish_reason: "stop" }) + event("b", "1e.1-0", { token_ids: [6], index: 1 });
  const plane = planeOf(stream([begun, cut()]), gone(), stream([DONE]));
  await textOf(plane, { body: { ...CHAT, return_token_ids: true, n: 2 } });
  assert.deepEqual(JSON.parse(plane.requests[2].content).generated_token_ids, [null, [6]]);
});

test("a refused connection is tried at the next server with the same id", async () => {
  const plane = planeOf(refused(), stream([event("a", "1-0"), DONE]));
  await textOf(plane);
  assert.deepEqual(plane.asked(), [SEND_1, SEND_2]);
  assert.deepEqual(plane.requests.map(({ headers }) => headers.get("x-request-id")), [ID, ID]);
});

test("a request that may have arrived is looked for before it is sent again", async () => {
  const plane = planeOf(cut(), gone(), stream([event("a", "1-0"), DONE]));
  assert.equal(await textOf(plane), event("a", "1-0") + DONE);
  assert.deepEqual(plane.asked(), [SEND_1, RESUME_2, SEND_2]);
});

test("a whole answer is fetched whole", async () => {
  const plane = planeOf(stream(['{"half', cut()], { "content-type": "application/json" }), Response.json({ id: "x" }));
  const answered = await ask(plane, { body: { ...CHAT, stream: false } });
  assert.deepEqual(await answered.json(), { id: "x" });
  assert.deepEqual(plane.asked(), [SEND_1, RESUME_2]);
  assert.equal(plane.requests[1].headers.get("accept"), "application/json");
});

test("what is not retryable is not sent again", async () => {
  for (const refusal of [
    failed(503, "X", false),
    failed(503, "X", true, { "x-should-retry": "false" }),
    failed(400, "INVALID_ARGUMENT", false),
    new Response("", { status: 500 }),
  ]) {
    const plane = planeOf(refusal);
    assert.equal((await ask(plane)).status, refusal.status);
    assert.deepEqual(plane.asked(), [SEND_1]);
  }
});

test("what is retryable is sent again", async () => {
  for (const refusal of [
    failed(503, "X", true),
    failed(503, "X", false, { "x-should-retry": "true" }),
    new Response("", { status: 429 }),
    new Response("<html>", { status: 502 }),
  ]) {
    const plane = planeOf(refusal, stream([event("a", "1-0"), DONE]));
    assert.equal((await ask(plane)).status, 200);
    assert.deepEqual(plane.asked(), [SEND_1, SEND_2]);
  }
});

test("the SDK is told not to retry what has been retried enough", async () => {
  const answered = await ask(planeOf(failed(503, "OVERLOADED", true, { "retry-after": "1000" })));
  assert.equal(answered.status, 503);
  assert.equal(answered.headers.get("x-should-retry"), "false");
});

test("the deadline of the user travels", async () => {
  const plane = planeOf(failed(503, "X", true, { "retry-after-ms": "20" }), stream([event("a", "1-0"), DONE]));
  await textOf(plane, { headers: { "x-request-timeout": "30s" } });
  const [first, second] = plane.requests.map(({ headers }) => Number(headers.get("x-request-timeout")));
  assert.ok(second > 0 && second <= first - 0.015 && first <= 30, `${first}, ${second}`);
});

test("a user who leaves ends the answer", async () => {
  for (const leave of ["cancel", "abort"]) {
    const plane = planeOf(stream([event("a", "1-0"), event("b", "2-0"), DONE]));
    const controller = new AbortController();
    const reader = (await ask(plane, { signal: controller.signal })).body.getReader();
    await reader.read();
    if (leave === "cancel") await reader.cancel();
    else controller.abort();
    await new Promise(setImmediate);
    assert.deepEqual(plane.cancels, [`/v1/requests/${ID}/cancel`]);
  }
});

test("a user who leaves ends the answer by its own id if the name that the user chose cannot be one", async () => {
  const plane = planeOf(stream([event("a", "1-0"), event("b", "2-0"), DONE]));
  const reader = (await ask(plane, { headers: { "x-request-id": "mine" } })).body.getReader();
  await reader.read();
  await reader.cancel();
  assert.deepEqual(plane.cancels, [`/v1/requests/${ID}/cancel`]);
});

test("base URLs that no request could match are refused", () => {
  for (const urls of [[], "http://first:8000", ["first:8000"], ["127.0.0.1:8000"], ["http://first:8000", "second"]]) {
    assert.throws(() => unbrokenFetch(urls), /base URL/);
  }
});

test("a user who leaves may let the answer go on", async () => {
  const plane = planeOf(stream([event("a", "1-0"), event("b", "2-0"), DONE]));
  const reader = (await ask(plane, { headers: { "x-on-disconnect": "continue" } })).body.getReader();
  await reader.read();
  await reader.cancel();
  assert.deepEqual(plane.cancels, []);
});

test("other requests pass through", async () => {
  const plane = planeOf(new Response("", { status: 503 }));
  const fetch = unbrokenFetch(URLS, { fetch: plane.fetch });
  assert.equal((await fetch(`${URLS[0]}/v1/embeddings`, { method: "POST", body: "{}" })).status, 503);
});

function retriesOf({ timeoutMs, drawn = 1 } = {}) {
  const time = { now: 100 };
  return [new Retries({}, timeoutMs, () => time.now, () => drawn), time];
}

test("pauses are drawn below a bound that doubles up to the cap", () => {
  const [longest] = retriesOf();
  const [half] = retriesOf({ drawn: 0.5 });
  assert.deepEqual(Array.from({ length: 7 }, () => longest.pauseMs()), [250, 500, 1000, 2000, 4000, 8000, 8000]);
  assert.deepEqual(Array.from({ length: 3 }, () => half.pauseMs()), [125, 250, 500]);
});

test("time asleep is at most a share of the deadline, and at least what the server asks for", () => {
  const [retries] = retriesOf({ timeoutMs: 10_000 });
  assert.equal(retries.pauseMs({ atLeastMs: 4_000 }), 4_000);
  retries.progressed();
  assert.equal(retries.pauseMs(), undefined);
});

test("the deadline counts from the last event unless the user has set it", () => {
  for (const [timeoutMs, expected] of [[600_000, undefined], [undefined, 250]]) {
    const [retries, time] = retriesOf({ timeoutMs });
    time.now += 599_900;
    retries.progressed();
    assert.equal(retries.pauseMs(), expected);
  }
});

test("retries without progress are bounded", () => {
  const [retries] = retriesOf({ drawn: 0 });
  assert.deepEqual(Array.from({ length: 21 }, () => retries.pauseMs()), [...Array(20).fill(0), undefined]);
  retries.progressed();
  assert.equal(retries.pauseMs(), 0);
});
