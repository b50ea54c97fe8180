/**
 * `.npy` files (numpy.org/doc/stable/reference/generated/numpy.lib.format.html) and the numbers in them.
 *
 * @typedef {object} Header
 * @property {string} dtype its name in a request; that of NumPy where the service has none
 * @property {number[]} shape
 * @property {number} offset of the data in the file
 * @property {boolean} swapped whether the bytes or the axes are in the other order
 */

const MAGIC = [0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59];
/** As long as the service reads a header, with what is before its text. */
const LONGEST = 64 * 1024 + 12;
const PLAIN = ["the .npy header must be a dictionary of 'descr', 'fortran_order' and 'shape' with plain values"];

/** Bytes of an element. @type {Record<string, number>} */
export const BYTES = { f32: 4, f16: 2, bf16: 2, f64: 8, s32: 4, s64: 8 };
/** NumPy has no bfloat16: its files have raw bytes, or unsigned integers. @type {Record<string, string>} */
const READ = { f4: "f32", f2: "f16", f8: "f64", i4: "s32", i8: "s64", V2: "bf16", u2: "bf16" };
/** @type {Record<string, string>} */
const WRITTEN = { f32: "<f4", f16: "<f2", bf16: "<V2", f64: "<f8" };

/** A file that is not a `.npy` file, or is damaged. */
export class NpyFault extends Error {}

/** Read the header of a file; only the header is read. @param {Blob} file @returns {Promise<Header>} @throws {NpyFault} */
export async function readHeader(file) {
  const bytes = new Uint8Array(await file.slice(0, LONGEST).arrayBuffer());
  if (bytes.length < 12 || MAGIC.some((each, index) => bytes[index] !== each))
    throw new NpyFault("a .npy file must begin with the bytes 93 4E 55 4D 50 59");
  const view = new DataView(bytes.buffer);
  const begin = bytes[6] === 1 ? 10 : 12;
  const offset = begin + (begin === 10 ? view.getUint16(8, true) : view.getUint32(8, true));
  if (offset > bytes.length) throw new NpyFault("the .npy data ends inside its header");
  const text = new TextDecoder("latin1").decode(bytes.subarray(begin, offset));
  const [descr] = /(?<=['"]descr['"]: *['"])[^'"]*/.exec(text) ?? [];
  const [dims] = /(?<=['"]shape['"]: *\()[\d, ]*(?=\))/.exec(text) ?? [];
  if (descr === undefined || dims === undefined) throw new NpyFault(PLAIN[0]);
  const shape = (dims.match(/\d+/g) ?? []).map(Number);
  const dtype = READ[descr.slice(1)] ?? descr;
  const size = shape.reduce((all, each) => all * each, BYTES[dtype] ?? 0);
  if (dtype in BYTES && file.size - offset !== size)
    throw new NpyFault(
      `dtype and shape need ${size} bytes, but ${file.size - offset < size ? file.size - offset : "more"} arrived`,
    );
  const swapped = descr.startsWith(">") || /['"]fortran_order['"]: *True/.test(text);
  return { dtype, shape, offset, swapped };
}

/** What `numpy.save` writes before the data of a C-ordered array. @param {string} dtype @param {number[]} shape @returns {Uint8Array<ArrayBuffer>} */
export function header(dtype, shape) {
  const dims = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  const text = `{'descr': '${WRITTEN[dtype]}', 'fortran_order': False, 'shape': (${dims}), }`;
  const length = Math.ceil((text.length + 11) / 64) * 64 - 10;
  const bytes = new Uint8Array(10 + length).fill(0x20);
  bytes.set([...MAGIC, 1, 0, length & 255, length >> 8]);
  bytes.set(new TextEncoder().encode(text), 10);
  bytes[bytes.length - 1] = 0x0a;
  return bytes;
}

/** The bits of f32 numbers, rounded to the nearest of a dtype, ties to even. @param {string} dtype @param {Float32Array<ArrayBuffer>} values @returns {Float32Array<ArrayBuffer> | Uint16Array<ArrayBuffer>} */
export function narrow(dtype, values) {
  if (dtype === "f32") return values;
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  const half = dtype === "bf16" ? brain : binary16;
  return Uint16Array.from(bits, half);
}

/** @param {number} bits of a finite f32 @returns {number} */
const brain = (bits) => (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;

/** @param {number} bits of a finite f32 @returns {number} */
function binary16(bits) {
  const sign = (bits >>> 16) & 0x8000;
  const size = bits & 0x7fffffff;
  if (size < 0x38800000) {
    // Multiples of 2^-24; the result may be the smallest normal number.
    const units = (size < 0x800000 ? 0 : (size & 0x7fffff) | 0x800000) * 2 ** ((size >>> 23) - 126);
    const below = Math.floor(units);
    const rest = units - below;
    return sign | (below + (rest > 0.5 || (rest === 0.5 && below & 1) ? 1 : 0));
  }
  return sign | Math.min(0x7c00, (size - 0x38000000 + 0xfff + ((size >>> 13) & 1)) >>> 13);
}

/** @type {Float32Array | null} */
let halves = null;

/** Numbers as f32: bytes of f32, f16 or bf16. @param {string} dtype @param {Uint8Array<ArrayBuffer>} bytes aligned @returns {Float32Array<ArrayBuffer>} */
export function widen(dtype, bytes) {
  if (dtype === "f32") return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  const bits = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2);
  if (dtype === "bf16") return new Float32Array(Uint32Array.from(bits, (each) => each << 16).buffer);
  halves ??= Float32Array.from({ length: 65536 }, (_, each) => ofBinary16(each));
  const table = halves;
  return Float32Array.from(bits, (each) => table[each] ?? 0);
}

/** @param {number} bits @returns {number} */
function ofBinary16(bits) {
  const [exponent, digits] = [(bits >> 10) & 31, bits & 1023];
  const size =
    exponent === 31
      ? digits
        ? Number.NaN
        : Infinity
      : exponent
        ? (1 + digits / 1024) * 2 ** (exponent - 15)
        : digits * 2 ** -24;
  return bits & 0x8000 ? -size : size;
}

/** The numbers in a file, or null where they are not those of a C-ordered tensor of some dtype and shape. @param {Blob} file @param {Header} header @param {string} dtype @param {number[]} shape @returns {Promise<Float32Array<ArrayBuffer> | null>} */
export async function readNumbers(file, header, dtype, shape) {
  const known = header.dtype === dtype && String(header.shape) === String(shape);
  return known && !header.swapped ? widen(dtype, new Uint8Array(await file.slice(header.offset).arrayBuffer())) : null;
}
