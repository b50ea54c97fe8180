/** The reply `application/x-tensor-stream`: frames with a JSON header, and with the bytes of a tile. */

import { answered, Unreachable } from "./client.js";

export const MEDIA_TYPE = "application/x-tensor-stream";
const MAGIC = 0x31474743;
const CUT = "The reply stopped before its end.";

/**
 * @typedef {object} Frame
 * @property {any} header
 * @property {Uint8Array<ArrayBuffer>} body in memory of its own
 */

/**
 * The frames of a reply, as they arrive.
 * @param {Response} reply @returns {AsyncGenerator<Frame>}
 * @throws {Unreachable | DOMException} Unreachable where the reply stops within a frame
 */
export async function* frames(reply) {
  const bytes = new Bytes(/** @type {ReadableStream<Uint8Array<ArrayBuffer>>} */ (reply.body).getReader());
  for (;;) {
    const head = await bytes.read(16, true);
    if (!head) return;
    const view = new DataView(head.buffer);
    if (view.getUint32(0, true) !== MAGIC) throw new Unreachable("The reply is damaged.");
    const text = await bytes.read(view.getUint32(4, true));
    const body = await bytes.read(Number(view.getBigUint64(8, true)));
    // TCP has checked the bytes, and the whole tensor has a checksum: that of a frame is not looked at.
    await bytes.read(4);
    yield { header: JSON.parse(new TextDecoder().decode(text)), body };
  }
}

/** Reads a stream by counts of bytes. */
class Bytes {
  /** @param {ReadableStreamDefaultReader<Uint8Array<ArrayBuffer>>} reader */
  constructor(reader) {
    this.reader = reader;
    this.chunk = new Uint8Array(0);
    this.at = 0;
  }

  /**
   * @overload @param {number} count @returns {Promise<Uint8Array<ArrayBuffer>>}
   * @overload @param {number} count @param {true} orEnd @returns {Promise<Uint8Array<ArrayBuffer> | null>}
   * @param {number} count @param {boolean} [orEnd] whether the stream may end here, which gives null
   */
  async read(count, orEnd = false) {
    const found = new Uint8Array(count);
    let length = 0;
    while (length < count) {
      if (this.at === this.chunk.length) {
        const { done, value } = await answered(this.reader.read());
        if (done && orEnd && length === 0) return null;
        if (done) throw new Unreachable(CUT);
        [this.chunk, this.at] = [value, 0];
      }
      const part = this.chunk.subarray(this.at, this.at + count - length);
      found.set(part, length);
      length += part.length;
      this.at += part.length;
    }
    return found;
  }
}
