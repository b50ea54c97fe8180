/**
 * The arithmetic of a layer: padding, sizes, channels, and which elements of src, weights and dst meet.
 *
 * On each spatial axis the taps step over one of the two data tensors, the wide one: src of a convolution, dst of a
 * transposed one. With x a position of the other, the narrow one, tap k meets y = x * stride + k * dilation - begin.
 * tests/web/test_arithmetic.py holds this module against `schemas` and the NumPy oracle.
 */

/** @typedef {"src" | "weights" | "dst"} Role */
/** @typedef {"none" | "same_upper" | "same_lower" | "valid"} AutoPad */

/**
 * @typedef {"Convolution" | "ConvolutionBackwardData" | "ConvolutionBackwardWeights" | "ConvTranspose" | "ConvTransposeBackwardData" | "ConvTransposeBackwardWeights" | "BiasAdd" | "BiasAddBackward"} Op
 */

/**
 * A layer and the operation on it. Lists have one entry for each spatial axis; `dst` is empty where the size of
 * diff_dst follows from the others. `i` and `o` are the channels of src and dst.
 * @typedef {object} Layer
 * @property {Op} op
 * @property {"f32" | "bf16" | "f16"} dtype
 * @property {number} n
 * @property {number} i
 * @property {number} o
 * @property {number} groups
 * @property {number[]} src
 * @property {number[]} dst
 * @property {number[]} kernel
 * @property {number[]} strides
 * @property {number[]} dilations
 * @property {number[]} pads_begin
 * @property {number[]} pads_end
 * @property {number[]} output_padding
 * @property {AutoPad} auto_pad
 * @property {"NCX" | "NXC"} data_format
 * @property {"XIO" | "OIX" | "XOI" | "IOX"} weights_format
 * @property {"I" | "O"} groups_axis
 */

/**
 * One resolved spatial axis. `span` is the distance from the first tap to the last, both included.
 * @typedef {object} Axis
 * @property {number} src
 * @property {number} dst
 * @property {number} wide
 * @property {number} narrow
 * @property {number} kernel
 * @property {number} stride
 * @property {number} dilation
 * @property {number} span
 * @property {number} begin
 * @property {number} end
 * @property {number} extra output padding
 * @property {boolean} fits whether the sizes are possible
 */

/**
 * @typedef {object} Resolved
 * @property {Axis[]} axes
 * @property {boolean} transposed
 * @property {boolean} bias whether the operation adds or sums a bias, and has no products
 * @property {Record<Role, number[]>} shapes in the layer's formats
 * @property {number} macs
 * @property {boolean} fits whether the service accepts the layer
 */

/** One product of an axis: narrow position, tap and wide position. @typedef {{x: number, k: number, y: number}} Meeting */

/**
 * What each operation computes and reads, by role: names of tensors, inputs first.
 * @type {Record<Op, {transposed: boolean, bias?: boolean, output: Role, names: Partial<Record<Role, string>>}>}
 */
export const OPERATIONS = {
  Convolution: { transposed: false, output: "dst", names: { src: "src", weights: "weights", dst: "dst" } },
  ConvolutionBackwardData: {
    transposed: false,
    output: "src",
    names: { dst: "diff_dst", weights: "weights", src: "diff_src" },
  },
  ConvolutionBackwardWeights: {
    transposed: false,
    output: "weights",
    names: { src: "src", dst: "diff_dst", weights: "diff_weights" },
  },
  ConvTranspose: { transposed: true, output: "dst", names: { src: "src", weights: "weights", dst: "dst" } },
  ConvTransposeBackwardData: {
    transposed: true,
    output: "src",
    names: { dst: "diff_dst", weights: "weights", src: "diff_src" },
  },
  ConvTransposeBackwardWeights: {
    transposed: true,
    output: "weights",
    names: { src: "src", dst: "diff_dst", weights: "diff_weights" },
  },
  BiasAdd: { transposed: false, bias: true, output: "dst", names: { src: "src", weights: "bias", dst: "dst" } },
  BiasAddBackward: {
    transposed: false,
    bias: true,
    output: "weights",
    names: { dst: "diff_dst", weights: "diff_bias" },
  },
};

/** @param {number[]} numbers @returns {number} */
export const product = (numbers) => numbers.reduce((all, each) => all * each, 1);

/**
 * An entry that a list must have.
 * @template Item @param {readonly Item[]} list @param {number} index @returns {Item} @throws {RangeError}
 */
export function entry(list, index) {
  const found = list[index];
  if (found === undefined) throw new RangeError(`no entry ${index} in a list of ${list.length}`);
  return found;
}

/** The roles of an operation's tensors, inputs first. @param {Op} op @returns {Role[]} */
export const roles = (op) => /** @type {Role[]} */ (Object.keys(OPERATIONS[op].names));

/** The name of a tensor. @param {Op} op @param {Role} role @returns {string} */
export const nameOf = (op, role) => OPERATIONS[op].names[role] ?? role;

/** Whether the size of diff_dst is a field of its own; where src is inferred from it, it follows from src here. @param {Op} op @returns {boolean} */
export const takesDst = (op) =>
  !OPERATIONS[op].bias && (OPERATIONS[op].output === "weights" || op === "ConvolutionBackwardData");

/**
 * Padding at the beginning and the end of an axis.
 * @param {Layer} layer @param {number} axis @param {number} span @returns {[number, number]}
 */
function pads(layer, axis, span) {
  const mode = layer.auto_pad;
  if (mode === "none") return [entry(layer.pads_begin, axis), entry(layer.pads_end, axis)];
  if (mode === "valid") return [0, 0];
  const stride = entry(layer.strides, axis);
  const past = OPERATIONS[layer.op].transposed ? stride : entry(layer.src, axis) % stride || stride;
  const total = Math.max(0, span - past);
  const half = Math.floor(total / 2);
  return mode === "same_upper" ? [half, total - half] : [total - half, half];
}

/** @param {Layer} layer @param {number} index @returns {Axis} */
function resolveAxis(layer, index) {
  const { transposed, bias, output } = OPERATIONS[layer.op];
  const src = entry(layer.src, index);
  if (bias) {
    const plain = { wide: src, narrow: src, kernel: 1, stride: 1, dilation: 1, span: 1, begin: 0, end: 0, extra: 0 };
    return { src, dst: src, ...plain, fits: true };
  }
  const [kernel, stride] = [entry(layer.kernel, index), entry(layer.strides, index)];
  const dilation = entry(layer.dilations, index);
  const span = (kernel - 1) * dilation + 1;
  const [begin, end] = pads(layer, index, span);
  const axis = { src, kernel, stride, dilation, span, begin, end };
  const asked = takesDst(layer.op) ? (layer.dst[index] ?? null) : null;
  if (!transposed) {
    const room = src + begin + end - span;
    const dst = room < 0 ? 0 : Math.floor(room / stride) + 1;
    const extra = output === "src" && room >= 0 ? room % stride : 0;
    return { ...axis, dst, wide: src, narrow: dst, extra, fits: dst > 0 && (asked ?? dst) === dst };
  }
  const least = stride * (src - 1) + span - begin - end;
  // Where output_padding is absent, a given size of diff_dst decides it.
  const inferred = asked !== null && !layer.output_padding.some(Boolean);
  const extra = inferred ? asked - least : entry(layer.output_padding, index);
  const dst = least + extra;
  const fits = dst > 0 && extra >= 0 && extra < stride && (asked ?? dst) === dst;
  return { ...axis, dst, wide: dst, narrow: src, extra, fits };
}

/** Resolve padding, sizes and shapes. @param {Layer} layer @returns {Resolved} */
export function resolve(layer) {
  const { transposed, bias = false, output } = OPERATIONS[layer.op];
  const axes = layer.src.map((_, index) => resolveAxis(layer, index));
  const { n, i, groups } = layer;
  const o = bias ? i : layer.o;
  const stored = storedChannels(layer);
  const kernel = axes.map((axis) => axis.kernel);
  /** @param {number} channels @param {"src" | "dst"} role */
  const data = (channels, role) =>
    arranged(layer.data_format, { N: [n], C: [channels], X: axes.map((axis) => axis[role]) });
  const shapes = {
    src: data(i, "src"),
    weights: bias ? [o] : arranged(layer.weights_format, { I: [stored.i], O: [stored.o], X: kernel }),
    dst: data(o, "dst"),
  };
  const divides = bias || (i % groups === 0 && o % groups === 0);
  const ranked = output !== "weights" || !bias || axes.length > 1;
  const pixels = product(axes.map((axis) => axis.narrow));
  const macs = bias ? product(shapes.dst) : n * pixels * o * product(kernel) * (i / groups);
  return { axes, transposed, bias, shapes, macs, fits: divides && ranked && axes.every((axis) => axis.fits) };
}

/** The axis of the weights that groups divide. @param {Layer} layer @returns {"I" | "O"} */
export function groupsAxis(layer) {
  if (!OPERATIONS[layer.op].transposed) return "I";
  return layer.groups === 1 ? "O" : layer.groups_axis;
}

/** The channels that the weights have on their axes I and O: one group's on the axis that groups divide. @param {Layer} layer @returns {{i: number, o: number}} */
export function storedChannels(layer) {
  const { i, o, groups } = layer;
  return groupsAxis(layer) === "I" ? { i: i / groups, o } : { i, o: o / groups };
}

/**
 * What belongs to the letters of a format, in its order: N, C and X of the data, I, O and X of the weights.
 * @template Item @param {string} format @param {Record<string, Item[]>} parts @returns {Item[]}
 */
export const arranged = (format, parts) => [...format].flatMap((letter) => parts[letter] ?? []);

/**
 * All products of one axis that an element takes part in; those with y outside of the wide tensor fall into padding.
 * @param {Axis} axis @param {"narrow" | "tap" | "wide"} kind @param {number} at @returns {Meeting[]}
 */
export function meetings({ narrow, kernel, stride, dilation, begin }, kind, at) {
  const found = [];
  if (kind === "tap") {
    for (let x = 0; x < narrow; x++) found.push({ x, k: at, y: x * stride + at * dilation - begin });
    return found;
  }
  for (let k = 0; k < kernel; k++) {
    const x = kind === "narrow" ? at : (at + begin - k * dilation) / stride;
    if (Number.isInteger(x) && x >= 0 && x < narrow) found.push({ x, k, y: x * stride + k * dilation - begin });
  }
  return found;
}

/** What a role is on its axes. @param {Resolved} resolved @param {Role} role @returns {"narrow" | "tap" | "wide"} */
export function kindOf(resolved, role) {
  if (role === "weights") return "tap";
  return (role === "src") === resolved.transposed ? "narrow" : "wide";
}

/** The coordinate of a meeting that belongs to a role. @param {Resolved} resolved @param {Role} role @returns {"x" | "k" | "y"} */
export function letterOf(resolved, role) {
  const kind = kindOf(resolved, role);
  return kind === "tap" ? "k" : kind === "narrow" ? "x" : "y";
}

/**
 * An element of one of the tensors: image, channels of src and dst, and position on the spatial axes (or tap). `n`, `i`
 * and `o` that don't belong to the tensor say which part of the others is shown.
 * @typedef {{role: Role, n: number, i: number, o: number, at: number[]}} Element
 */

/**
 * What takes part with an element: per axis, in the wide tensor (`real`) and in all (`all`); `inside` and `padded` count
 * both over all axes, and `times` is the number of channels or images that each is repeated for.
 * @typedef {object} Reach
 * @property {Meeting[][]} real
 * @property {Meeting[][]} all
 * @property {number} inside
 * @property {number} padded
 * @property {number} times
 */

/** @param {Layer} layer @param {Resolved} resolved @param {Element} element @returns {Reach} */
export function reach(layer, resolved, element) {
  const kind = kindOf(resolved, element.role);
  const all = resolved.axes.map((axis, index) => meetings(axis, kind, entry(element.at, index)));
  const real = all.map((met, index) => met.filter(({ y }) => y >= 0 && y < entry(resolved.axes, index).wide));
  const inside = product(real.map((met) => met.length));
  const padded = product(all.map((met) => met.length)) - inside;
  const { src, dst } = peers(layer, element);
  const repeated = element.role === "weights" ? layer.n : element.role === "src" ? dst.length : src.length;
  return { real, all, inside, padded, times: repeated };
}

/** The channels of src and dst in one group; each channel is a group of a bias. @param {Layer} layer @returns {{src: number, dst: number}} */
const groupSizes = ({ op, i, o, groups }) =>
  OPERATIONS[op].bias ? { src: 1, dst: 1 } : { src: i / groups, dst: o / groups };

/** A range of channels. @typedef {{from: number, length: number}} Channels */

/**
 * The channels of src and dst that take part with an element: the one, and all of its group.
 * @param {Layer} layer @param {Element} element @returns {{src: Channels, dst: Channels}}
 */
export function peers(layer, { role, i, o }) {
  const sizes = groupSizes(layer);
  const group = Math.floor(role === "src" ? i / sizes.src : o / sizes.dst);
  /** @param {"src" | "dst"} side @param {number} channel @param {boolean} all @returns {Channels} */
  const channels = (side, channel, all) =>
    all ? { from: group * sizes[side], length: sizes[side] } : { from: channel, length: 1 };
  return { src: channels("src", i, role === "dst"), dst: channels("dst", o, role === "src") };
}

/** The size of a tensor on a spatial axis: the taps of weights. @param {Axis} axis @param {Role} role @returns {number} */
export const sizeOn = (axis, role) => (role === "weights" ? axis.kernel : axis[role]);

/** The element in the middle of a tensor, of the first image and channels. @param {Resolved} resolved @param {Role} role @returns {Element} */
export function middle({ axes }, role) {
  const at = axes.map((axis) => Math.max(0, Math.floor((sizeOn(axis, role) - 1) / 2)));
  return { role, n: 0, i: 0, o: 0, at };
}

/** Whether weights connect two channels. @param {Layer} layer @param {number} i @param {number} o @returns {boolean} */
export function connected(layer, i, o) {
  const sizes = groupSizes(layer);
  return Math.floor(i / sizes.src) === Math.floor(o / sizes.dst);
}

/**
 * All combinations of one meeting per axis, the last axis fastest, up to a limit.
 * @param {Meeting[][]} axes @param {number} [limit] @returns {Meeting[][]}
 */
export function combinations(axes, limit = Infinity) {
  /** @type {Meeting[][]} */
  let found = [[]];
  for (const axis of axes) {
    const longer = [];
    for (const first of found) for (const each of axis) if (longer.length < limit) longer.push([...first, each]);
    found = longer;
  }
  return found;
}

/**
 * The index of an element in its tensor, in the layer's formats.
 * @param {Layer} layer @param {Element} element @returns {number[]}
 */
export function indexOf(layer, { role, n, i, o, at }) {
  if (role !== "weights") return arranged(layer.data_format, { N: [n], C: [role === "src" ? i : o], X: at });
  if (OPERATIONS[layer.op].bias) return [o];
  const stored = storedChannels(layer);
  return arranged(layer.weights_format, { I: [i % stored.i], O: [o % stored.o], X: at });
}

/** The offset of an index in C order. @param {number[]} shape @param {number[]} index @returns {number} */
export const offsetOf = (shape, index) => shape.reduce((offset, size, axis) => offset * size + entry(index, axis), 0);
