/** The reply `text/event-stream`: JSON-RPC messages, the response last. */

import { failure } from "./call.js";
import { answered, Unreachable } from "./client.js";

export const MEDIA_TYPE = "text/event-stream";

/**
 * Read a reply to its response.
 * @param {Response} reply @param {(done: number, total: number) => void} progress is told how many units of the work are done
 * @returns {Promise<any>} the result @throws {import("./client.js").ServiceError | Unreachable | DOMException}
 */
export async function resultOf(reply, progress) {
  const stream = /** @type {ReadableStream<Uint8Array<ArrayBuffer>>} */ (reply.body);
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await answered(reader.read());
    if (done) throw new Unreachable("The reply stopped before its end.");
    const parts = (text + value).split("\n\n");
    text = parts.pop() ?? "";
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const { params, result, error } = JSON.parse(part.slice(6));
      if (result) return result;
      if (error) throw failure(error);
      progress(params.progress, params.total);
    }
  }
}
