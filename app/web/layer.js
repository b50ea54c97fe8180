/** Layers to begin with, and the request that a layer is. */

import { entry, groupsAxis, nameOf, OPERATIONS, resolve, roles, takesDst } from "./arithmetic.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */

/** Attributes with one entry for each spatial axis, and the smallest value of each. */
export const LISTS = /** @type {const} */ ({
  src: 1,
  dst: 1,
  kernel: 1,
  strides: 1,
  dilations: 1,
  pads_begin: 0,
  pads_end: 0,
  output_padding: 0,
});
export const NUMBERS = /** @type {const} */ (["n", "i", "o", "groups"]);
/** The values of each attribute that is a word. */
export const CHOICES = /** @type {const} */ ({
  dtype: ["f32", "bf16", "f16"],
  auto_pad: ["none", "same_upper", "same_lower", "valid"],
  data_format: ["NCX", "NXC"],
  weights_format: ["OIX", "IOX", "XIO", "XOI"],
  groups_axis: ["O", "I"],
});
/** Largest number that a field takes. */
export const MOST = 100000;

/** @type {Layer} */
const PLAIN = {
  op: "Convolution",
  dtype: "f32",
  n: 1,
  i: 1,
  o: 1,
  groups: 1,
  src: [7, 7],
  dst: [],
  kernel: [3, 3],
  strides: [2, 2],
  dilations: [1, 1],
  pads_begin: [1, 1],
  pads_end: [1, 1],
  output_padding: [0, 0],
  auto_pad: "none",
  data_format: "NCX",
  weights_format: "OIX",
  groups_axis: "O",
};

/** The layer that an operation starts with. @param {Layer["op"]} op @returns {Layer} */
export function plain(op) {
  const { transposed, bias } = OPERATIONS[op];
  const layer = structuredClone({ ...PLAIN, op });
  if (bias)
    return { ...layer, i: 3, o: 3, src: [4, 6], kernel: [1, 1], strides: [1, 1], pads_begin: [0, 0], pads_end: [0, 0] };
  return transposed ? { ...layer, src: [4, 4], output_padding: [1, 1], weights_format: "IOX" } : layer;
}

/** @param {Partial<Layer> & Pick<Layer, "op">} given @returns {Layer} */
const layer = (given) => ({ ...plain(given.op), output_padding: (given.src ?? PLAIN.src).map(() => 0), ...given });

/** Layers of known networks, each with an operation on it. @type {Record<string, Layer>} */
export const NAMED = {
  "ResNet stem": layer({
    op: "ConvolutionBackwardWeights",
    i: 3,
    o: 64,
    src: [224, 224],
    kernel: [7, 7],
    pads_begin: [3, 3],
    pads_end: [3, 3],
  }),
  "DCGAN generator": layer({
    op: "ConvTranspose",
    i: 512,
    o: 256,
    src: [8, 8],
    kernel: [4, 4],
  }),
  "U-Net up-convolution": layer({
    op: "ConvTransposeBackwardWeights",
    i: 128,
    o: 64,
    src: [28, 28],
    kernel: [2, 2],
    pads_begin: [0, 0],
    pads_end: [0, 0],
  }),
  "WaveNet, dilation 8": layer({
    op: "Convolution",
    i: 32,
    o: 64,
    src: [40],
    kernel: [2],
    strides: [1],
    dilations: [8],
    pads_begin: [8],
    pads_end: [0],
  }),
  "Depthwise 3 x 3": layer({
    op: "ConvolutionBackwardData",
    i: 32,
    o: 32,
    groups: 32,
    src: [14, 14],
    strides: [1, 1],
  }),
  "Video, 3 x 3 x 3": layer({
    op: "Convolution",
    i: 3,
    o: 8,
    src: [6, 10, 10],
    kernel: [3, 3, 3],
    strides: [1, 2, 2],
    dilations: [1, 1, 1],
    pads_begin: [1, 1, 1],
    pads_end: [1, 1, 1],
  }),
};

/** The same layer with another operation; output padding is dropped where the operation has none. @param {Layer} given @param {Layer["op"]} op @returns {Layer} */
export function withOperation(given, op) {
  const [was, now] = [OPERATIONS[given.op], OPERATIONS[op]];
  if (was.bias || now.bias) return plain(op);
  const made = { ...given, op, dst: [] };
  if (was.transposed === now.transposed) return made;
  // dst of a convolution is src of the transposed one that is its gradient.
  const sizes = resolve(given);
  const src = sizes.axes.map((axis) => Math.max(1, axis.dst));
  const order = [...given.weights_format].map((letter) => ({ I: "O", O: "I", X: "X" })[letter]).join("");
  return {
    ...made,
    src,
    i: given.o,
    o: given.i,
    weights_format: /** @type {Layer["weights_format"]} */ (order),
    groups_axis: "O",
    output_padding: sizes.axes.map((axis) =>
      now.transposed ? (axis.src + axis.begin + axis.end - axis.span) % axis.stride : 0,
    ),
  };
}

/** The same layer with more or fewer spatial axes. @param {Layer} given @param {number} rank @returns {Layer} */
export function withRank(given, rank) {
  const lists = /** @type {(keyof typeof LISTS)[]} */ (Object.keys(LISTS)).map((name) => {
    const list = given[name].slice(-rank);
    while (name !== "dst" && list.length < rank) list.unshift(entry(list, 0));
    return [name, name === "dst" ? [] : list];
  });
  return { ...given, ...Object.fromEntries(lists) };
}

/** @typedef {{op: Layer["op"], attributes: Record<string, unknown>, inputs: Record<string, {dtype: string, shape: number[]}>}} Request */

/** The request object for a layer, as the APIs take it, without data. @param {Layer} layer @returns {Request} */
export function request(layer) {
  const { op, dtype } = layer;
  const { transposed, bias, output } = OPERATIONS[op];
  const { shapes } = resolve(layer);
  if (takesDst(op) && layer.dst.length)
    shapes.dst.splice(layer.data_format === "NCX" ? 2 : 1, layer.dst.length, ...layer.dst);
  const inputs = Object.fromEntries(
    roles(op)
      .filter((role) => role !== output)
      .map((role) => [nameOf(op, role), { dtype, shape: shapes[role].map(Math.floor) }]),
  );
  if (bias) return { op, attributes: { data_format: layer.data_format }, inputs };
  const { strides, pads_begin, pads_end, dilations, auto_pad, groups, data_format, weights_format } = layer;
  /** @type {Record<string, unknown>} */
  const attributes =
    auto_pad === "none" ? { strides, pads_begin, pads_end, dilations } : { strides, dilations, auto_pad };
  if (transposed && layer.output_padding.some(Boolean)) attributes.output_padding = layer.output_padding;
  if (groups !== 1) attributes.groups = groups;
  Object.assign(attributes, { data_format, weights_format });
  if (output === "weights") attributes.weights_shape = shapes.weights.map(Math.floor);
  if (output === "src" && !transposed) attributes.dst_shape = shapes.src;
  return { op, attributes, inputs };
}

/** What a layer has beside its numbers. @param {Layer} layer @returns {string} */
export const groupsText = (layer) => (layer.groups === 1 ? "" : `groups divide ${groupsAxis(layer)}`);
