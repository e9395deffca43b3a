// Reads an answer that outlives its connection and its frontend: copy this file. The rules are those of "Coming back over
// gRPC" in docs/clients.md.
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";

const FAILURES_MAX = 10; // So many attempts in a row may fail without an item.
const PAUSE_MS = 100;
const PAUSE_MS_MAX = 5_000;
const OWN = [grpc.status.DEADLINE_EXCEEDED, grpc.status.CANCELLED]; // Set by this client's own library, without details.

/**
 * Yields the items of the answer, each once. Throws the status if it is not OK.
 *
 * `clients`: of several frontends, of which the first one is asked first. `details`: returns the details of a status.
 * `deadline`: in ms, as Date.now().
 */
export async function* generate(clients, request, { deadline, details }) {
  const id = randomBytes(16).toString("hex");
  const kept = new grpc.Metadata();
  kept.set("x-on-disconnect", "continue");
  let cursor = "";
  let isBegun = false;
  let isComplete = false;
  let failures = 0;
  for (let index = 0; ; ) {
    const client = clients[index % clients.length];
    const items = isBegun
      ? client.resume({ generation_id: id, cursor }, { deadline })
      : client.generate({ ...request, request_id: id }, kept, { deadline });
    let atLeastMs = 0;
    let isUnknown = false;
    try {
      for await (const item of items) {
        failures = 0;
        cursor = item.cursor || cursor;
        isComplete = item.complete_final;
        yield item;
      }
      return;
    } catch (error) {
      if (isComplete) return;
      isUnknown = isBegun && cursor === "" && error.code === grpc.status.NOT_FOUND;
      if (failures === FAILURES_MAX || !(isUnknown || isBroken(error, details(error)))) throw error;
      atLeastMs = (details(error).retry_after_s ?? 0) * 1_000;
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

/** Whether to come back after this failure. Without ErrorInfo, the connection has broken, or a proxy has answered. */
function isBroken({ code }, { reason, metadata }) {
  if (reason !== undefined) return metadata.retryable === "true";
  return code !== undefined && !OWN.includes(code);
}
