/** A tensor that the service computes: its tiles, its checksum, and the file that it is saved to. */

import { make } from "./make.js";
import { eachRow } from "./maps.js";
import { BYTES, header } from "./npy.js";

/** @typedef {{name: string, dtype: string, shape: number[], bytes: Uint8Array<ArrayBuffer>}} Tensor */

/** Write a tile to its place. @param {Tensor} into @param {number[]} offset @param {number[]} shape @param {Uint8Array} body */
export function place({ dtype, shape: whole, bytes }, offset, shape, body) {
  const item = BYTES[dtype] ?? 4;
  const run = (shape[shape.length - 1] ?? 1) * item;
  let start = 0;
  eachRow(whole, offset, shape, (flat) => {
    bytes.set(body.subarray(start, start + run), flat * item);
    start += run;
  });
}

/** The checksum of bytes as the service writes it, or null where the browser has none: it has it for pages from this machine and over HTTPS. @param {Uint8Array<ArrayBuffer>} bytes */
export async function checksum(bytes) {
  if (!globalThis.crypto?.subtle) return null;
  const found = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...found].map((each) => each.toString(16).padStart(2, "0")).join("");
}

/** @param {Tensor} tensor @returns {Blob} */
export const npy = ({ dtype, shape, bytes }) => new Blob([header(dtype, shape), bytes]);

/** @param {string} name @param {Blob} file */
export function download(name, file) {
  const address = URL.createObjectURL(file);
  make("a", { href: address, download: `${name}.npy` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
