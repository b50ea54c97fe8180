/** A layer as code: the line of NumPy for one element, and the whole call for curl, Python, PyTorch and JSON-RPC. */

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
import { request } from "./layer.js";

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

/** @param {unknown} value @returns {string} */
const python = (value) =>
  typeof value === "string"
    ? `"${value}"`
    : Array.isArray(value)
      ? `(${value.join(", ")}${value.length === 1 ? "," : ""})`
      : String(value);

/** A name in the case of Python's functions. @param {string} op @returns {string} */
const snake = (op) => op.replace(/(?<!^)[A-Z]/g, (letter) => `_${letter}`).toLowerCase();

/** @param {Layer} layer @returns {string} */
export function jsonRpc(layer) {
  const { op, ...params } = request(layer);
  return json({ jsonrpc: "2.0", id: 1, method: "ops.validate", params: { op, ...params } });
}

/** JSON with a line for each member, and lists of numbers in one line. @param {unknown} value @returns {string} */
function json(value) {
  return JSON.stringify(value, null, 1).replace(/\[[^[\]{}]*\]/g, (list) =>
    list.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"),
  );
}

/** @param {Layer} layer @param {string} origin @param {boolean} [keyed] @returns {string} */
export function curl(layer, origin, keyed = false) {
  const { op, ...body } = request(layer);
  const key = keyed ? ' \\\n  -H "X-API-Key: $CONVGRAD_API_KEY"' : "";
  return `curl -sS ${origin}/v1/ops/${op}/validate${key} \\\n  -H 'Content-Type: application/json' -d '${json(body)}'`;
}

/** @param {Layer} layer @param {string} origin @returns {string} */
export function pythonCall(layer, origin) {
  const { op, attributes, inputs } = request(layer);
  const tensors = Object.entries(inputs).map(([name, { shape }]) => `${name} = np.ones(${python(shape)}, np.float32)`);
  const keywords = Object.entries(attributes).map(([name, value]) => `        ${name}=${python(value)},`);
  return [
    "import numpy as np",
    "import convgrad",
    "",
    ...tensors,
    `with convgrad.Client("${origin}") as client:`,
    `    ${nameOf(op, OPERATIONS[op].output)} = client.${snake(op)}(`,
    `        ${Object.keys(inputs).join(", ")},`,
    ...keywords,
    "    )",
  ].join("\n");
}

/** The same sums by PyTorch's own operators and automatic differentiation, in PyTorch's layouts. @param {Layer} layer @param {Resolved} resolved @returns {string} */
export function pytorch(layer, resolved) {
  const { op, n, i, o, groups } = layer;
  const { axes, transposed } = resolved;
  const { output } = OPERATIONS[op];
  const of = (/** @type {keyof import("./arithmetic.js").Axis} */ key) => python(axes.map((axis) => axis[key]));
  const spatial = axes.map((axis) => axis.src);
  const start = ["import torch", "import torch.nn.functional as F", ""];
  const tensor = (/** @type {string} */ name, /** @type {number[]} */ shape) =>
    `${name} = torch.ones(${shape.join(", ")}, requires_grad=True)`;
  if (resolved.bias) {
    const data = tensor("src", [n, i, ...spatial]);
    const added = `dst = src + bias.reshape(${[-1, ...axes.map(() => 1)].join(", ")})`;
    const forward = [...start, data, tensor("bias", [i]), added];
    return [
      ...forward,
      ...(output === "dst" ? [] : ["diff_bias, = torch.autograd.grad(dst, bias, torch.ones_like(dst))"]),
    ].join("\n");
  }
  const lines = [...start, tensor("src", [n, i, ...spatial])];
  lines.push(
    tensor("weights", [...(transposed ? [i, o / groups] : [o, i / groups]), ...axes.map((axis) => axis.kernel)]),
  );
  const even = axes.every((axis) => axis.begin === axis.end);
  const call = `F.conv${transposed ? "_transpose" : ""}${axes.length}d`;
  const shared = `stride=${of("stride")}, dilation=${of("dilation")}, groups=${groups}`;
  // F.pad lists the last axis first; its negative numbers cut elements off.
  const around = [...axes]
    .reverse()
    .flatMap((axis) => (transposed ? [-axis.begin, axis.extra - axis.end] : [axis.begin, axis.end]));
  if (transposed) {
    const extra = axes.some((axis) => axis.extra) ? `, output_padding=${of("extra")}` : "";
    if (even) lines.push(`dst = ${call}(src, weights, padding=${of("begin")}${extra}, ${shared})`);
    else lines.push(`dst = F.pad(${call}(src, weights, ${shared}), ${python(around)})`);
  } else if (even) lines.push(`dst = ${call}(src, weights, padding=${of("begin")}, ${shared})`);
  else lines.push(`dst = ${call}(F.pad(src, ${python(around)}), weights, ${shared})`);
  if (output !== "dst")
    lines.push("diff_dst = torch.ones_like(dst)", `diff_${output}, = torch.autograd.grad(dst, ${output}, diff_dst)`);
  return lines.join("\n");
}
