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
 * A layer and the operation on it. Lists have one entry for each spatial axis; `dst` is empty where the size of
 * diff_dst follows from the others. `i` and `o` are the channels of src and dst.
 * @typedef {object} Layer
 * @property {string} op
 * @property {string} dtype
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
 * @type {Record<string, {transposed: boolean, bias?: boolean, output: Role, names: Partial<Record<Role, string>>}>}
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

/** The roles of an operation's tensors, inputs first. @param {string} op @returns {Role[]} */
export const roles = (op) => /** @type {Role[]} */ (Object.keys(OPERATIONS[op].names));

/** The name of a tensor. @param {string} op @param {Role} role @returns {string} */
export const nameOf = (op, role) => OPERATIONS[op].names[role] ?? role;

/** Whether the size of diff_dst is a field of its own; where src is inferred from it, it follows from src here. @param {string} op @returns {boolean} */
export const takesDst = (op) =>
  !OPERATIONS[op].bias && (OPERATIONS[op].output === "weights" || op === "ConvolutionBackwardData");

/** @param {AutoPad} mode @param {number} total @returns {[number, number]} */
function halves(mode, total) {
  const half = Math.floor(total / 2);
  return mode === "same_upper" ? [half, total - half] : [total - half, half];
}

/**
 * Padding at the beginning and the end of an axis.
 * @param {Layer} layer @param {number} axis @param {number} span @returns {[number, number]}
 */
function pads(layer, axis, span) {
  const mode = layer.auto_pad;
  if (mode === "none") return [layer.pads_begin[axis], layer.pads_end[axis]];
  if (mode === "valid") return [0, 0];
  const stride = layer.strides[axis];
  const past = OPERATIONS[layer.op].transposed ? stride : layer.src[axis] % stride || stride;
  return halves(mode, Math.max(0, span - past));
}

/** @param {Layer} layer @param {number} index @returns {Axis} */
function resolveAxis(layer, index) {
  const { transposed, bias, output } = OPERATIONS[layer.op];
  const src = layer.src[index];
  if (bias) {
    const plain = { wide: src, narrow: src, kernel: 1, stride: 1, dilation: 1, span: 1, begin: 0, end: 0, extra: 0 };
    return { src, dst: src, ...plain, fits: true };
  }
  const [kernel, stride, dilation] = [layer.kernel[index], layer.strides[index], layer.dilations[index]];
  const span = (kernel - 1) * dilation + 1;
  const [begin, end] = pads(layer, index, span);
  const axis = { src, kernel, stride, dilation, span, begin, end };
  const asked = takesDst(layer.op) && layer.dst.length ? layer.dst[index] : null;
  if (!transposed) {
    const room = src + begin + end - span;
    const dst = room < 0 ? 0 : Math.floor(room / stride) + 1;
    const extra = output === "src" && room >= 0 ? room % stride : 0;
    return { ...axis, dst, wide: src, narrow: dst, extra, fits: dst > 0 && (asked ?? dst) === dst };
  }
  const least = stride * (src - 1) + span - begin - end;
  // Where output_padding is absent, a given size of diff_dst decides it.
  const inferred = asked !== null && !layer.output_padding.some(Boolean);
  const extra = inferred ? asked - least : layer.output_padding[index];
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
  const spatial = { src: axes.map((axis) => axis.src), dst: axes.map((axis) => axis.dst) };
  const divided = groupsAxis(layer);
  const [ofI, ofO] = divided === "I" ? [i / groups, o] : [i, o / groups];
  const extents = { I: [ofI], O: [ofO], X: axes.map((axis) => axis.kernel) };
  const letters = /** @type {("I" | "O" | "X")[]} */ ([...layer.weights_format]);
  const shapes = {
    src: dataShape(layer, i, spatial.src),
    weights: bias ? [o] : letters.flatMap((letter) => extents[letter]),
    dst: dataShape(layer, o, spatial.dst),
  };
  const divides = bias || (i % groups === 0 && o % groups === 0);
  const ranked = output !== "weights" || !bias || axes.length > 1;
  const pixels = product(transposed ? spatial.src : spatial.dst);
  const macs = bias ? product(shapes.dst) : n * pixels * o * product(extents.X) * (i / groups);
  return { axes, transposed, bias, shapes, macs, fits: divides && ranked && axes.every((axis) => axis.fits) };
}

/** The axis of the weights that groups divide. @param {Layer} layer @returns {"I" | "O"} */
export function groupsAxis(layer) {
  if (!OPERATIONS[layer.op].transposed) return "I";
  return layer.groups === 1 ? "O" : layer.groups_axis;
}

/** @param {Layer} layer @param {number} channels @param {number[]} spatial @returns {number[]} */
function dataShape(layer, channels, spatial) {
  return layer.data_format === "NCX" ? [layer.n, channels, ...spatial] : [layer.n, ...spatial, channels];
}

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
  const all = resolved.axes.map((axis, index) => meetings(axis, kind, element.at[index]));
  const real = all.map((met, index) => met.filter(({ y }) => y >= 0 && y < resolved.axes[index].wide));
  const inside = product(real.map((met) => met.length));
  const padded = product(all.map((met) => met.length)) - inside;
  const { src, dst } = peers(layer, element);
  const repeated = element.role === "weights" ? layer.n : element.role === "src" ? dst.length : src.length;
  return { real, all, inside, padded, times: repeated };
}

/**
 * The channels of src and dst that take part with an element, as ranges.
 * @param {Layer} layer @param {Element} element
 * @returns {{src: {from: number, length: number}, dst: {from: number, length: number}}}
 */
export function peers(layer, { role, i, o }) {
  const bias = OPERATIONS[layer.op].bias;
  const groups = bias ? layer.i : layer.groups;
  const [ofSrc, ofDst] = [layer.i / groups, (bias ? layer.i : layer.o) / groups];
  const group = role === "src" ? Math.floor(i / ofSrc) : Math.floor(o / ofDst);
  const src = role === "dst" ? { from: group * ofSrc, length: ofSrc } : { from: i, length: 1 };
  const dst = role === "src" ? { from: group * ofDst, length: ofDst } : { from: o, length: 1 };
  return { src, dst };
}

/** Whether weights connect two channels. @param {Layer} layer @param {number} i @param {number} o @returns {boolean} */
export function connected(layer, i, o) {
  if (OPERATIONS[layer.op].bias) return i === o;
  return Math.floor(i / (layer.i / layer.groups)) === Math.floor(o / (layer.o / layer.groups));
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
  if (role !== "weights") {
    const channel = role === "src" ? i : o;
    return layer.data_format === "NCX" ? [n, channel, ...at] : [n, ...at, channel];
  }
  if (OPERATIONS[layer.op].bias) return [o];
  const divided = groupsAxis(layer);
  const local = {
    I: [divided === "I" ? i % (layer.i / layer.groups) : i],
    O: [divided === "O" ? o % (layer.o / layer.groups) : o],
    X: at,
  };
  return [.../** @type {("I" | "O" | "X")[]} */ ([...layer.weights_format])].flatMap((letter) => local[letter]);
}

/** The offset of an index in C order. @param {number[]} shape @param {number[]} index @returns {number} */
export const offsetOf = (shape, index) => shape.reduce((offset, size, axis) => offset * size + index[axis], 0);
