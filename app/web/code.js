/** The line of NumPy for one element of a layer. */

import {
  arranged,
  entry,
  indexOf,
  letterOf,
  nameOf,
  OPERATIONS,
  peers,
  reach,
  roles,
  sizeOn,
  storedChannels,
} from "./arithmetic.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Resolved} Resolved */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Role} Role */
/** Where an axis of a tensor is read: one index, or a slice with a letter. @typedef {{text: string, letter: string}} Read */

/** @param {number[]} at evenly spaced @param {number} size @param {string} letter @returns {Read} */
function slice(at, size, letter) {
  const start = entry(at, 0);
  if (at.length === 1) return { text: String(start), letter: "" };
  const step = entry(at, 1) - start;
  const stop = entry(at, at.length - 1) + Math.sign(step);
  if (step === 1 && start === 0 && stop === size) return { text: ":", letter };
  return { text: `${start}:${stop < 0 ? "" : stop}${step === 1 ? "" : `:${step}`}`, letter };
}

/** @param {number} from @param {number} length @returns {number[]} */
const range = (from, length) => Array.from({ length }, (_, index) => from + index);

/**
 * A tensor with the slices of what takes part with an element.
 * @param {Layer} layer @param {Resolved} resolved @param {Element} element @param {Role} role
 * @returns {{text: string, letters: string}}
 */
function part(layer, resolved, element, role) {
  const name = nameOf(layer.op, role);
  if (role === element.role) return { text: `${name}[${indexOf(layer, element).join(", ")}]`, letters: "" };
  const { real } = reach(layer, resolved, element);
  const { src, dst } = peers(layer, element);
  const spatial = real.map((met, axis) => {
    const size = sizeOn(entry(resolved.axes, axis), role);
    return slice(
      met.map((each) => each[letterOf(resolved, role)]),
      size,
      "dhw".slice(-real.length).charAt(axis),
    );
  });
  const stored = storedChannels(layer);
  const channel = (/** @type {import("./arithmetic.js").Channels} */ { from, length }, /** @type {number} */ size) =>
    slice(range(from % size, length), size, "c");
  /** @type {Read[]} */
  let read;
  if (role !== "weights") {
    const images =
      element.role === "weights" ? slice(range(0, layer.n), layer.n, "n") : { text: String(element.n), letter: "" };
    const channels = role === "src" ? channel(src, layer.i) : channel(dst, resolved.bias ? layer.i : layer.o);
    read = arranged(layer.data_format, { N: [images], C: [channels], X: spatial });
  } else if (resolved.bias) {
    read = [channel(dst, layer.i)];
  } else {
    const channels = { I: [channel(src, stored.i)], O: [channel(dst, stored.o)] };
    read = arranged(layer.weights_format, { ...channels, X: spatial });
  }
  return {
    text: `${name}[${read.map((each) => each.text).join(", ")}]`,
    letters: read.map((each) => each.letter).join(""),
  };
}

/** The line of NumPy for an element: its sum, or what it adds to the output. @param {Layer} layer @param {Resolved} resolved @param {Element} element @returns {string} */
export function numpyLine(layer, resolved, element) {
  const output = OPERATIONS[layer.op].output;
  const here = part(layer, resolved, element, element.role);
  if (!reach(layer, resolved, element).inside)
    return element.role === output ? `${here.text} = 0` : `# ${here.text} is not read`;
  const others = roles(layer.op)
    .filter((role) => role !== element.role)
    .map((role) => ({ role, ...part(layer, resolved, element, role) }));
  if (element.role === output) {
    const [first, second] = [entry(others, 0), others[1]];
    const sign = resolved.bias ? "+" : "*";
    if (!second) return `${here.text} = ${first.letters ? `${first.text}.sum()` : first.text}`;
    if (!first.letters) return `${here.text} = ${first.text} ${sign} ${second.text}`;
    if (first.letters === second.letters) return `${here.text} = (${first.text} * ${second.text}).sum()`;
    return `${here.text} = np.einsum("${first.letters},${second.letters}->", ${first.text}, ${second.text})`;
  }
  const target = /** @type {typeof others[0]} */ (others.find((each) => each.role === output));
  const other = others.find((each) => each.role !== output);
  if (!other || resolved.bias) return `${target.text} += ${here.text}`;
  const same = target.letters === other.letters;
  return `${target.text} += ${here.text} * ${same ? other.text : `np.einsum("${other.letters}->${target.letters}", ${other.text})`}`;
}
