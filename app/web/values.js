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

/** Most elements of all tensors, and most products, for which numbers are made. */
const ELEMENTS = 60000;
const PRODUCTS = 20000000;

/** Whether a layer is so small that its numbers are drawn. @param {Resolved} resolved @returns {boolean} */
export const isSmall = ({ fits, macs, shapes }) =>
  fits && macs <= PRODUCTS && Object.values(shapes).every((shape) => product(shape) <= ELEMENTS);

/**
 * Fill the inputs with numbers of the layer's dtype.
 * @param {Layer} layer @param {Resolved} resolved @param {import("./generate.js").Given} given @returns {Values}
 */
export const fill = (layer, resolved, given) =>
  Object.fromEntries(
    inputsOf(layer.op).map((role) => {
      const number = numbers(layer, resolved, role, given);
      const made = Float32Array.from({ length: product(resolved.shapes[role]) }, (_, offset) => number(offset));
      return [role, widen(layer.dtype, bytesOf(layer.dtype, made))];
    }),
  );

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

/** What a rounding to each dtype changes a number by at most: as a share of it, and where it is very small. @type {Record<Layer["dtype"], [number, number]>} */
const ROUNDING = { f32: [2 ** -24, 2 ** -126], f16: [2 ** -11, 2 ** -25], bf16: [2 ** -8, 2 ** -126] };

/**
 * Whether a computed element is its sum, as exactly as a sum of `count` products in f32 can be.
 * @param {Layer} layer @param {Resolved} resolved @param {Values} values @param {Element} element @param {number} computed @returns {boolean}
 */
export function agrees(layer, resolved, values, element, computed) {
  const total = sum(layer, resolved, values, element);
  if (Object.is(computed, rounded(layer.dtype, total)) || computed === total) return true;
  const sizes = Object.fromEntries(Object.entries(values).map(([role, each]) => [role, each.map(Math.abs)]));
  const { inside, times } = reach(layer, resolved, element);
  const size = sum(layer, resolved, sizes, element);
  const [share, least] = ROUNDING[layer.dtype];
  const count = inside * times + 1;
  return Math.abs(computed - total) <= count * (2 ** -24 * size + 2 ** -126) + share * Math.abs(computed) + least;
}

/** A number of a dtype with the fewest digits that are read as it. @param {string} dtype @param {number} value @returns {string} */
export function shortest(dtype, value) {
  if (Number.isInteger(value) && Math.abs(value) < 2 ** 24) return String(value);
  for (let digits = 1; digits < 9; digits++) {
    const short = Number(value.toPrecision(digits));
    if (rounded(dtype, short) === value) return String(short);
  }
  return String(Number(value.toPrecision(9)));
}

/** A number as the nearest of a dtype. @param {string} dtype @param {number} value @returns {number} */
export function rounded(dtype, value) {
  const [found = 0] = widen(dtype, bytesOf(dtype, Float32Array.of(value)));
  return found;
}

/** A number as people type it, or null where it is none or infinite in a dtype. @param {string} dtype @param {string} text @returns {number | null} */
export function readNumber(dtype, text) {
  const written = text.trim().replace("\u2212", "-");
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(written)) return null;
  return Number.isFinite(rounded(dtype, Number(written))) ? Number(written) : null;
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

/** Numbers in lines of whole rows, separated by commas. @param {string} dtype @param {number[]} shape @param {Float32Array} numbers @returns {string} */
export function lines(dtype, shape, numbers) {
  const found = [""];
  const width = shape[shape.length - 1] ?? 1;
  for (let start = 0; start < numbers.length; start += width) {
    const row = [...numbers.subarray(start, start + width)].map((number) => shortest(dtype, number)).join(", ");
    const last = found[found.length - 1] ?? "";
    if (!last) found[found.length - 1] = row;
    else if (last.length + row.length < 90) found[found.length - 1] = `${last}, ${row}`;
    else found.push(row);
  }
  return found.join(",\n  ");
}
