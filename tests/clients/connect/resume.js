// Reads an answer that outlives its connection and its frontend: copy this file. The rules are those of "Coming back over
// gRPC" in docs/clients.md.
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";
import { ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";

const FAILURES_MAX = 10; // So many attempts in a row may fail without an item.
const PAUSE_MS = 100;
const PAUSE_MS_MAX = 5_000;

/**
 * Yields the items of the answer, each once. Throws ConnectError.
 *
 * `clients`: of several frontends, of which the first one is asked first. `deadline`: in ms, as Date.now().
 */
export async function* generate(clients, request, deadline) {
  const id = randomBytes(16).toString("hex");
  const headers = { "x-on-disconnect": "continue" };
  let cursor = "";
  let isBegun = false;
  let isComplete = false;
  let failures = 0;
  for (let index = 0; ; ) {
    const client = clients[index % clients.length];
    const timeoutMs = Math.max(1, deadline - Date.now());
    const items = isBegun
      ? client.resume({ generationId: id, cursor }, { timeoutMs })
      : client.generate({ ...request, requestId: id }, { timeoutMs, headers });
    let atLeastMs = 0;
    let isUnknown = false;
    try {
      for await (const item of items) {
        failures = 0;
        cursor = item.cursor || cursor;
        isComplete = item.completeFinal;
        yield item;
      }
      return;
    } catch (error) {
      if (isComplete) return;
      isUnknown = isBegun && cursor === "" && error.code === Code.NotFound;
      if (failures === FAILURES_MAX || !(isUnknown || isBroken(error))) throw error;
      const [retry] = error.findDetails(RetryInfoSchema);
      if (retry !== undefined) atLeastMs = durationMs(retry.retryDelay);
    }
    failures += 1;
    isBegun = !isUnknown;
    if (isUnknown) continue; // No frontend has begun with it: ask this one anew.
    index += 1;
    if (failures < clients.length) continue;
    const pauseMs = Math.random() * Math.min(PAUSE_MS_MAX, PAUSE_MS * 2 ** (failures - clients.length));
    await sleep(Math.max(0, Math.min(Math.max(pauseMs, atLeastMs), deadline - Date.now())));
  }
}

/**
 * Whether to come back after this failure. Without ErrorInfo, the connection has broken, or a proxy has answered. Node
 * reports a lost connection as Canceled.
 */
function isBroken(error) {
  if (!(error instanceof ConnectError)) return false;
  const [info] = error.findDetails(ErrorInfoSchema);
  return info === undefined ? error.code !== Code.DeadlineExceeded : info.metadata.retryable === "true";
}
