/** A call as Python: by the client, and the same sums by PyTorch. */

import { arranged, nameOf, OPERATIONS } from "./arithmetic.js";
import { note } from "./shell.js";
import { lines } from "./values.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Resolved} Resolved */
/** @typedef {import("./arithmetic.js").Role} Role */
/** @typedef {import("./shell.js").Call} Call */

/** @param {unknown} value @returns {string} */
const python = (value) =>
  typeof value === "string"
    ? JSON.stringify(value)
    : Array.isArray(value)
      ? `(${value.join(", ")}${value.length === 1 ? "," : ""})`
      : String(value);

/** A name in the case of Python's functions. @param {string} op @returns {string} */
const snake = (op) => op.replace(/(?<!^)[A-Z]/g, (letter) => `_${letter}`).toLowerCase();

/** @type {Record<string, [string, string]>} */
const DTYPES = {
  f32: ["np.float32", "torch.float32"],
  f16: ["np.float16", "torch.float16"],
  bf16: ["ml_dtypes.bfloat16", "torch.bfloat16"],
};

/** @param {Call} call @returns {string} */
export function pythonCall(call) {
  const { op, attributes, inputs, options, origin } = call;
  const output = nameOf(op, OPERATIONS[op].output);
  const narrow = Object.values(inputs).some(({ dtype }) => dtype === "bf16");
  const tensors = Object.entries(inputs).map(([name, { dtype, shape, numbers, file }]) => {
    const [type = ""] = DTYPES[dtype] ?? [];
    if (numbers) return `${name} = np.array([\n  ${lines(dtype, shape, numbers)}\n], ${type}).reshape${python(shape)}`;
    return `${name} = np.load(${python(file)})${dtype === "bf16" ? `.view(${type})` : ""}`;
  });
  const keywords = Object.entries({ ...attributes, ...options }).map(
    ([name, value]) => `        ${name}=${python(value)},`,
  );
  return [
    `${note(call)}import numpy as np`,
    ...(narrow ? ["import ml_dtypes"] : []),
    "import convgrad",
    "",
    ...tensors,
    `with convgrad.Client("${origin}") as client:`,
    `    ${output} = client.${snake(op)}(`,
    `        ${Object.keys(inputs).join(", ")},`,
    ...keywords,
    "    )",
    `print(${output})`,
  ].join("\n");
}

/** How a tensor gets from the layer's format to PyTorch's: the order of its axes, and the groups to move to the other axis. */
class Layout {
  /** @param {Layer} layer @param {Resolved} resolved @param {Role} role */
  constructor(layer, resolved, role) {
    const { n, i, o, groups } = layer;
    const spatial = (/** @type {keyof import("./arithmetic.js").Axis} */ key) =>
      resolved.axes.map((axis) => Number(axis[key]));
    const weights = role === "weights";
    const letters = weights ? (resolved.transposed ? "IOX" : "OIX") : "NCX";
    /** @type {Record<string, number[]>} */
    const at = {};
    let next = 0;
    for (const letter of weights ? layer.weights_format : layer.data_format)
      at[letter] = letter === "X" ? resolved.axes.map(() => next++) : [next++];
    this.order = arranged(letters, at);
    this.shape = weights
      ? [...(resolved.transposed ? [i, o / groups] : [o, i / groups]), ...spatial("kernel")]
      : [n, role === "src" ? i : o, ...spatial(role)];
    // PyTorch's groups divide the second axis.
    this.parts =
      weights && resolved.transposed && groups > 1 && layer.groups_axis === "I"
        ? [i / groups, groups, o / groups]
        : null;
  }

  /** @param {string} name */
  toTorch(name) {
    const moved = permuted(name, this.order);
    if (!this.parts) return moved;
    return `${moved}.reshape${python([...this.parts, ...this.shape.slice(2)])}.transpose(0, 1).reshape${python(this.shape)}`;
  }

  /** @param {string} name */
  fromTorch(name) {
    const [i = 1, groups = 1, o = 1] = this.parts ?? [];
    const spatial = this.shape.slice(2);
    const joined = this.parts
      ? `${name}.reshape${python([groups, i, o, ...spatial])}.transpose(0, 1).reshape${python([i, groups * o, ...spatial])}`
      : name;
    return permuted(
      joined,
      this.order.map((_, axis) => this.order.indexOf(axis)),
    );
  }
}

/** @param {string} name @param {number[]} order */
const permuted = (name, order) =>
  order.every((axis, index) => axis === index) ? name : `${name}.permute${python(order)}`;

/** The same sums by PyTorch's own operators and automatic differentiation, in PyTorch's layouts. @param {Call} call @param {Layer} layer @param {Resolved} resolved @returns {string} */
export function pytorch(call, layer, resolved) {
  const { op, inputs } = call;
  const { axes, transposed, bias } = resolved;
  const { output, names } = OPERATIONS[op];
  const result = nameOf(op, output);
  const of = (/** @type {keyof import("./arithmetic.js").Axis} */ key) => python(axes.map((axis) => axis[key]));
  const isFlat = (/** @type {Role} */ role) => bias && role === "weights";
  const given = Object.entries(names).flatMap(([key, name]) => {
    const spec = inputs[name];
    if (!spec) return [];
    const { dtype, shape, numbers, file } = spec;
    const [, type = ""] = DTYPES[dtype] ?? [];
    const read = numbers
      ? `torch.tensor([\n  ${lines(dtype, shape, numbers)}\n], dtype=${type}).reshape${python(shape)}`
      : `torch.from_numpy(np.load(${python(file)})${dtype === "bf16" ? `.view(np.int16)).view(${type})` : ")"}`;
    const role = /** @type {Role} */ (key);
    return [`${name} = ${isFlat(role) ? read : new Layout(layer, resolved, role).toTorch(read)}`];
  });
  const printed = `print(${isFlat(output) ? result : new Layout(layer, resolved, output).fromTorch(result)})`;
  const files = Object.values(inputs).some(({ file }) => file);
  const start = [
    `${note(call)}${files ? "import numpy as np\n" : ""}import torch`,
    ...(bias ? [""] : ["import torch.nn.functional as F", ""]),
    ...given,
  ];
  if (bias) {
    const one = `(${["0", ...axes.map((_, axis) => axis + 2)].join(", ")})`;
    const sum = output === "dst" ? `src + bias.reshape${python([-1, ...axes.map(() => 1)])}` : `diff_dst.sum(${one})`;
    return [...start, `${result} = ${sum}`, printed].join("\n");
  }
  // What a gradient is of need not be known: the sums are linear in it.
  if (output !== "dst") {
    const [, type] = DTYPES[layer.dtype] ?? [];
    const { shape } = new Layout(layer, resolved, output);
    start.push(`${output} = torch.zeros${python(shape)}.to(${type}).requires_grad_()`);
  }
  const even = axes.every((axis) => axis.begin === axis.end);
  const called = `F.conv${transposed ? "_transpose" : ""}${axes.length}d`;
  const shared = `stride=${of("stride")}, dilation=${of("dilation")}, groups=${layer.groups}`;
  // F.pad lists the last axis first; its negative numbers cut elements off.
  const around = [...axes]
    .reverse()
    .flatMap((axis) => (transposed ? [-axis.begin, axis.extra - axis.end] : [axis.begin, axis.end]));
  if (transposed) {
    const extra = axes.some((axis) => axis.extra) ? `, output_padding=${of("extra")}` : "";
    if (even) start.push(`dst = ${called}(src, weights, padding=${of("begin")}${extra}, ${shared})`);
    else start.push(`dst = F.pad(${called}(src, weights, ${shared}), ${python(around)})`);
  } else if (even) start.push(`dst = ${called}(src, weights, padding=${of("begin")}, ${shared})`);
  else start.push(`dst = ${called}(F.pad(src, ${python(around)}), weights, ${shared})`);
  if (output !== "dst") start.push(`${result}, = torch.autograd.grad(dst, ${output}, diff_dst)`);
  return [...start, printed].join("\n");
}
