/** Numbers for the tensors of a layer, and the sum of one element. They are small integers, so that sums are exact in f32, before the result is rounded to its dtype. */

import { combinations, indexOf, letterOf, nameOf, offsetOf, peers, product, reach } from "./arithmetic.js";
import { inputsOf, numbers } from "./generate.js";
import { narrow, widen } from "./npy.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Resolved} Resolved */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Role} Role */
/** @typedef {import("./arithmetic.js").Meeting} Meeting */
/** @typedef {Partial<Record<Role, Float32Array<ArrayBuffer>>>} Values */

/** How the inputs may be filled. */
export const KINDS = /** @type {const} */ (["counting", "impulse", "random", "none"]);
/** Most elements of all tensors, and most products, for which numbers are made. */
const ELEMENTS = 60000;
const PRODUCTS = 20000000;

/**
 * Fill the inputs; null where numbers would be too many. `impulse` is a 1 in the middle of the first input.
 * @param {Layer} layer @param {Resolved} resolved @param {string} kind @returns {Values | null}
 */
export function fill(layer, resolved, kind) {
  const all = Object.values(resolved.shapes).map(product);
  if (kind === "none" || !resolved.fits || all.some((size) => !(size <= ELEMENTS)) || resolved.macs > PRODUCTS)
    return null;
  return Object.fromEntries(
    inputsOf(layer.op).map((role) => {
      const number = numbers(layer, resolved, role, kind, 1);
      return [role, Float32Array.from({ length: product(resolved.shapes[role]) }, (_, offset) => number(offset))];
    }),
  );
}

/**
 * The products that an element takes part in, as the elements that meet, up to a limit: those of the first channel or image first.
 * @param {Layer} layer @param {Resolved} resolved @param {Element} element @param {number} [limit]
 * @returns {Generator<Record<Role, Element>>}
 */
export function* terms(layer, resolved, element, limit = Infinity) {
  const { real } = reach(layer, resolved, element);
  const { src, dst } = peers(layer, element);
  const spatial = combinations(real, limit);
  const images = element.role === "weights" ? { from: 0, length: layer.n } : { from: element.n, length: 1 };
  let left = limit;
  for (let n = images.from; n < images.from + images.length; n++) {
    for (let i = src.from; i < src.from + src.length; i++) {
      for (let o = dst.from; o < dst.from + dst.length; o++) {
        for (const met of spatial) {
          if (left-- <= 0) return;
          yield/** @type {Record<Role, Element>} */ (
            Object.fromEntries(
              /** @type {Role[]} */ (["src", "weights", "dst"]).map((role) => [
                role,
                { role, n, i, o, at: positions(resolved, role, met) },
              ]),
            )
          );
        }
      }
    }
  }
}

/** @param {Resolved} resolved @param {Role} role @param {Meeting[]} met @returns {number[]} */
const positions = (resolved, role, met) => met.map((each) => each[letterOf(resolved, role)]);

/** The number of an element, or undefined where there is none. @param {Layer} layer @param {Resolved} resolved @param {Values} values @param {Element} element */
export const numberOf = (layer, resolved, values, element) =>
  values[element.role]?.[offsetOf(resolved.shapes[element.role], indexOf(layer, element))];

/** The sum of an element of the output. @param {Layer} layer @param {Resolved} resolved @param {Values} values @param {Element} element @returns {number} */
export function sum(layer, resolved, values, element) {
  const inputs = inputsOf(layer.op);
  let total = 0;
  for (const term of terms(layer, resolved, element)) {
    const numbers = inputs.map((role) => numberOf(layer, resolved, values, term[role]) ?? 0);
    total += resolved.bias ? numbers.reduce((all, each) => all + each, 0) : product(numbers);
  }
  return total;
}

/** A number as the nearest of a dtype. @param {string} dtype @param {number} value @returns {number} */
export function rounded(dtype, value) {
  const [found = 0] = widen(dtype, bytesOf(dtype, Float32Array.of(value)));
  return found;
}

/** @param {string} dtype @param {Float32Array<ArrayBuffer>} values @returns {Uint8Array<ArrayBuffer>} */
function bytesOf(dtype, values) {
  const { buffer, byteOffset, byteLength } = narrow(dtype, values);
  return new Uint8Array(buffer, byteOffset, byteLength);
}

/** Numbers of a dtype as base64, little-endian. @param {string} dtype @param {Float32Array<ArrayBuffer>} values @returns {string} */
function encode(dtype, values) {
  const bytes = bytesOf(dtype, values);
  let text = "";
  for (let start = 0; start < bytes.length; start += 8192)
    text += String.fromCharCode(...bytes.subarray(start, start + 8192));
  return btoa(text);
}

/** @param {string} dtype @param {string} text @returns {Float32Array<ArrayBuffer>} */
export const decode = (dtype, text) =>
  widen(
    dtype,
    Uint8Array.from(atob(text), (each) => each.charCodeAt(0)),
  );

/** The inputs with data. @param {Layer} layer @param {Resolved} resolved @param {Values} values */
export const withData = (layer, resolved, values) =>
  Object.fromEntries(
    Object.entries(values).map(([role, numbers]) => [
      nameOf(layer.op, /** @type {Role} */ (role)),
      {
        dtype: layer.dtype,
        shape: resolved.shapes[/** @type {Role} */ (role)],
        data: encode(layer.dtype, numbers),
      },
    ]),
  );
