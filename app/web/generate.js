/** Numbers for the inputs of a layer, from a seed or typed: the same in the cells of the drawing, in files and in calls. */

import { entry, indexOf, middle, OPERATIONS, offsetOf, product, roles } from "./arithmetic.js";
import { header, narrow } from "./npy.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Resolved} Resolved */
/** @typedef {import("./arithmetic.js").Role} Role */
/** What the inputs hold: numbers of a kind, and those that were typed over them, by tensor and index. @typedef {{kind: string, seed: number, typed: Record<string, number>}} Given */

const CHUNK = 1 << 17;

/** What the inputs may be filled with, and how it is called. */
export const DATA = /** @type {const} */ ({
  counting: "counting numbers",
  impulse: "an impulse: 1, 0, 0, ..",
  random: "random integers, -4 to 5",
  normal: "normal random numbers",
  none: "counting numbers, not drawn",
});
/** The kinds that a seed changes. */
export const SEEDED = ["random", "normal"];

/** The roles of the inputs, in order. @param {Layer["op"]} op @returns {Role[]} */
export const inputsOf = (op) => roles(op).filter((role) => role !== OPERATIONS[op].output);

/** Mix 32 bits (lowbias32 of nullprogram.com/blog/2018/07/31). @param {number} bits @returns {number} */
function mixed(bits) {
  let x = bits ^ (bits >>> 16);
  x = Math.imul(x, 0x7feb352d);
  x ^= x >>> 15;
  x = Math.imul(x, 0x846ca68b);
  return (x ^ (x >>> 16)) >>> 0;
}

/**
 * Where counting numbers begin again. Sums have at most four digits, which a cell has room for, where numbers up to 9 allow it. Below 2^24 they are exact
 * in f32; from 65,520 on they are infinite in f16.
 * @param {Layer} layer @param {Resolved} resolved @returns {number}
 */
function highest(layer, resolved) {
  const products = resolved.macs / product(resolved.shapes[OPERATIONS[layer.op].output]);
  const sizes = inputsOf(layer.op).map((role) => product(resolved.shapes[role]));
  const largest = (/** @type {number} */ most) => product(sizes.map((size) => Math.min(size, most))) * products;
  let most = 99;
  while (most > 9 && largest(most) > 9999) most--;
  while (most > 1 && largest(most) > (layer.dtype === "f16" ? 65504 : 2 ** 24)) most--;
  return most;
}

/** The name of an element in `typed`. @param {Role} role @param {number[]} index @returns {string} */
export const typedName = (role, index) => `${role}:${index.join("x")}`;

/** The typed numbers that an input has a place for, by offset. @param {Resolved} resolved @param {Role} role @param {Given["typed"]} typed @returns {Map<number, number>} */
export function typedIn({ shapes }, role, typed) {
  const found = new Map();
  for (const [name, value] of Object.entries(typed)) {
    const [of, index = ""] = name.split(":");
    const at = index.split("x").map(Number);
    if (of === role && at.length === shapes[role].length && at.every((each, axis) => each < entry(shapes[role], axis)))
      found.set(offsetOf(shapes[role], at), value);
  }
  return found;
}

/**
 * The number of each element of an input, by its offset.
 * @param {Layer} layer @param {Resolved} resolved @param {Role} role @param {Given} given @returns {(offset: number) => number}
 */
export function numbers(layer, resolved, role, { kind, seed, typed }) {
  const made = generated(layer, resolved, role, kind, seed);
  const over = typedIn(resolved, role, typed);
  return over.size ? (offset) => over.get(offset) ?? made(offset) : made;
}

/**
 * An `impulse` is a 1 in the middle of the first input; the other has counting numbers.
 * @param {Layer} layer @param {Resolved} resolved @param {Role} role @param {string} kind @param {number} seed
 * @returns {(offset: number) => number}
 */
function generated(layer, resolved, role, kind, seed) {
  const order = inputsOf(layer.op).indexOf(role);
  const start = mixed(mixed(seed) + order);
  if (kind === "random") return (offset) => (mixed(start + offset) % 10) - 4;
  // The sum of four uniform numbers has nearly the normal distribution, and the same bits in every browser.
  if (kind === "normal")
    return (offset) => {
      const [one, two] = [mixed(start + 2 * offset), mixed(start + 2 * offset + 1)];
      return (((one & 0xffff) + (one >>> 16) + (two & 0xffff) + (two >>> 16) - 131070) / 65536) * 1.7320508;
    };
  if (kind === "impulse" && order === 0) {
    const one = offsetOf(resolved.shapes[role], indexOf(layer, middle(resolved, role)));
    return (offset) => (offset === one ? 1 : 0);
  }
  const most = highest(layer, resolved);
  return (offset) => 1 + (offset % most);
}

/**
 * An input as a `.npy` file, made a part at a time, so that the page still answers.
 * @param {Layer} layer @param {Resolved} resolved @param {Role} role @param {Given} given @param {AbortSignal} signal
 * @returns {Promise<Blob>}
 */
export async function npyOf(layer, resolved, role, given, signal) {
  const shape = resolved.shapes[role];
  const number = numbers(layer, resolved, role, given);
  const size = product(shape);
  /** @type {BlobPart[]} */
  const parts = [header(layer.dtype, shape)];
  for (let start = 0; start < size; start += CHUNK) {
    signal.throwIfAborted();
    const chunk = new Float32Array(Math.min(CHUNK, size - start));
    for (let index = 0; index < chunk.length; index++) chunk[index] = number(start + index);
    parts.push(narrow(layer.dtype, chunk));
    if (start) await new Promise((done) => setTimeout(done));
  }
  return new Blob(parts);
}
