/**
 * A result seen by some of its axes: by tap and by channels, or by pixel, channel and image. Each cell of a map has the
 * largest of its elements. The maps of a verification's report have the same names and axes.
 */

import { groupsAxis, OPERATIONS, product } from "./arithmetic.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Role} Role */
/** @typedef {import("./arithmetic.js").Element} Element */
/** Axes of the result that a map has, and what their positions are. @typedef {{name: string, axes: number[], words: string[]}} View */

/** Most cells on an axis of a map; larger axes are joined, as in reports. */
const MOST = 64;
/** Most planes of a map of three axes. */
const PLANES = 8;

/** What the axes of a result are, in its order. @param {Layer} layer @returns {string[]} */
export function axisWords(layer) {
  const { output, bias } = OPERATIONS[layer.op];
  const spatial = ["z", "y", "x"].slice(-layer.src.length);
  if (output !== "weights") {
    const pixels = spatial.map((axis) => `pixel ${axis}`);
    return layer.data_format === "NCX" ? ["image", "channel", ...pixels] : ["image", ...pixels, "channel"];
  }
  if (bias) return ["channel"];
  /** @type {Record<string, string[]>} */
  const words = { I: ["src channel"], O: ["dst channel"], X: spatial.map((axis) => `tap ${axis}`) };
  return [...layer.weights_format].flatMap((letter) => words[letter] ?? []);
}

/** The maps of a layer's result. @param {Layer} layer @returns {View[]} */
export function views(layer) {
  const words = axisWords(layer);
  const view = (/** @type {string} */ name, /** @type {RegExp} */ of) => {
    const axes = words.flatMap((word, axis) => (of.test(word) ? [axis] : []));
    return { name, axes, words: axes.map((axis) => words[axis] ?? "") };
  };
  const { output, bias } = OPERATIONS[layer.op];
  if (output !== "weights") return [view("pixel", /pixel/), view("channel", /channel/), view("image", /image/)];
  if (bias) return [view("channel", /channel/)];
  // Channels of dst go down, whatever the format.
  const [o, i] = [words.indexOf("dst channel"), words.indexOf("src channel")];
  return [view("tap", /tap/), { name: "channels", axes: [o, i], words: ["dst channel", "src channel"] }];
}

/** Where the cells of an axis begin, and where the last one ends. @param {number} size @param {number} cells @returns {number[]} */
export const starts = (size, cells) =>
  Array.from({ length: cells + 1 }, (_, cell) => Math.floor((size * cell) / cells));

/**
 * Join the first axis of a map of three to as many planes as are drawn.
 * @param {number[]} cells @param {number[]} values the largest of each cell @returns {{cells: number[], largest: number[]}}
 */
export function joinPlanes(cells, values) {
  const [planes = 1, ...others] = cells;
  if (cells.length < 3 || planes <= PLANES) return { cells, largest: values };
  const size = product(others);
  const from = starts(planes, PLANES);
  const largest = new Array(PLANES * size).fill(0);
  values.forEach((value, at) => {
    const plane = Math.floor(at / size);
    const joined = from.findLastIndex((start) => start <= plane);
    const cell = joined * size + (at % size);
    largest[cell] = Math.max(largest[cell], value);
  });
  return { cells: [PLANES, ...others], largest };
}

/** A map of a result that fills as its tiles arrive. */
export class Filling {
  /** @param {number[]} shape of the result @param {View} view */
  constructor(shape, view) {
    this.view = view;
    const sizes = view.axes.map((axis) => shape[axis] ?? 1);
    /** The cells on each axis. */
    this.cells = sizes.map((size, at) => Math.min(size, sizes.length === 3 && at === 0 ? PLANES : MOST));
    this.starts = this.cells.map((count, at) => starts(sizes[at] ?? 1, count));
    const count = product(this.cells);
    /** The largest magnitude in each cell, Infinity where there is a NaN. */
    this.largest = new Float32Array(count);
    /** The offset of that element in the result. */
    this.place = new Float64Array(count);
    this.arrived = new Float64Array(count);
    const others = product(shape) / product(sizes);
    this.whole = Float64Array.from({ length: count }, (_, cell) =>
      this.at(cell).reduce((all, at, axis) => {
        const from = this.starts[axis] ?? [];
        return all * ((from[at + 1] ?? 0) - (from[at] ?? 0));
      }, others),
    );
    // What a position on each axis of the result adds to the index of a cell; 0 on the axes that are joined.
    this.steps = shape.map((size, axis) => {
      const mine = view.axes.indexOf(axis);
      const steps = new Int32Array(size);
      if (mine < 0) return steps;
      const stride = product(this.cells.slice(mine + 1));
      const from = this.starts[mine] ?? [];
      for (let cell = 0; cell + 1 < from.length; cell++) steps.fill(cell * stride, from[cell], from[cell + 1]);
      return steps;
    });
    this.shape = shape;
  }

  /** The position of a cell on each axis of the map. @param {number} cell @returns {number[]} */
  at(cell) {
    return unravel(this.cells, cell);
  }

  /** Add a tile. @param {number[]} offset @param {number[]} shape @param {Float32Array} numbers in C order */
  add(offset, shape, numbers) {
    const last = shape.length - 1;
    const [width, from] = [shape[last] ?? 1, offset[last] ?? 0];
    const steps = this.steps[last] ?? new Int32Array(0);
    const { largest, place, arrived } = this;
    let next = 0;
    eachRow(this.shape, offset, shape, (flat, at) => {
      let cells = 0;
      for (let axis = 0; axis < last; axis++) cells += this.steps[axis]?.[at[axis] ?? 0] ?? 0;
      for (let x = 0; x < width; x++) {
        const number = numbers[next++] ?? 0;
        const size = Number.isNaN(number) ? Infinity : Math.abs(number);
        const cell = cells + (steps[from + x] ?? 0);
        arrived[cell] = (arrived[cell] ?? 0) + 1;
        if (size > (largest[cell] ?? 0)) {
          largest[cell] = size;
          place[cell] = flat + x;
        }
      }
    });
  }
}

/**
 * Visit the rows of a box in a tensor, in C order, with the offset of each one's first element in the tensor.
 * @param {number[]} whole shape of the tensor @param {number[]} offset @param {number[]} shape of the box
 * @param {(flat: number, at: number[]) => void} visit
 */
export function eachRow(whole, offset, shape, visit) {
  const last = whole.length - 1;
  const at = [...offset];
  for (let left = product(shape.slice(0, last)); left > 0; left--) {
    let flat = 0;
    for (let axis = 0; axis <= last; axis++) flat = flat * (whole[axis] ?? 1) + (at[axis] ?? 0);
    visit(flat, at);
    for (let axis = last - 1; axis >= 0; axis--) {
      at[axis] = (at[axis] ?? 0) + 1;
      if ((at[axis] ?? 0) < (offset[axis] ?? 0) + (shape[axis] ?? 0)) break;
      at[axis] = offset[axis] ?? 0;
    }
  }
}

/** The index at an offset in C order. @param {number[]} shape @param {number} offset @returns {number[]} */
export function unravel(shape, offset) {
  let left = offset;
  const found = [];
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    const size = shape[axis] ?? 1;
    found[axis] = left % size;
    left = Math.floor(left / size);
  }
  return found;
}

/**
 * The element at an index of a tensor, in the layer's formats; `beside` has the channels and image that the tensor has not.
 * @param {Layer} layer @param {Role} role @param {number[]} index @param {Element} beside @returns {Element}
 */
export function elementOf(layer, role, index, beside) {
  const { bias } = OPERATIONS[layer.op];
  const rank = layer.src.length;
  const number = (/** @type {number} */ axis) => index[axis] ?? 0;
  if (role !== "weights") {
    const first = layer.data_format === "NCX";
    const channel = number(first ? 1 : rank + 1);
    const at = index.slice(first ? 2 : 1, first ? 2 + rank : 1 + rank);
    const [i, o] = role === "src" ? [channel, beside.o] : [beside.i, channel];
    return { role, n: number(0), at, i: bias ? channel : i, o: bias ? channel : o };
  }
  if (bias) return { role, n: beside.n, i: number(0), o: number(0), at: layer.src.map(() => 0) };
  const letters = [...layer.weights_format];
  const x = letters.indexOf("X");
  const [i, o] = ["I", "O"].map((letter) => {
    const at = letters.indexOf(letter);
    return number(at < x ? at : at + rank - 1);
  });
  const [ofI, ofO] = [layer.i / layer.groups, layer.o / layer.groups];
  const divided = groupsAxis(layer);
  return {
    role,
    n: beside.n,
    i: divided === "I" ? (i ?? 0) + Math.floor((o ?? 0) / ofO) * ofI : (i ?? 0),
    o: divided === "O" ? (o ?? 0) + Math.floor((i ?? 0) / ofI) * ofO : (o ?? 0),
    at: index.slice(x, x + rank),
  };
}
