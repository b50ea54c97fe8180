/** The state of the page as the fragment of its address: `#op=ConvTranspose&src=4x4&at=dst:2x3`. */

import { middle, OPERATIONS, resolve, roles, sizeOn } from "./arithmetic.js";
import { CHOICES, LISTS, MOST, NUMBERS, plain, withRank } from "./layer.js";
import { KINDS } from "./values.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {{layer: Layer, element: Element, values: string}} State */

const LONGEST = 1000;

/** The state of a page without a fragment. @param {Layer["op"]} [op] @returns {State} */
export function initial(op = "ConvTransposeBackwardWeights") {
  const layer = plain(op);
  return { layer, element: first(layer), values: "counting" };
}

/** An element in the middle of what the operation computes. @param {Layer} layer @returns {Element} */
export function first(layer) {
  return middle(resolve(layer), OPERATIONS[layer.op].output);
}

/** Move an element to where the layer has one. @param {Layer} layer @param {Element} element @returns {Element} */
export function clamped(layer, element) {
  const { axes, bias } = resolve(layer);
  const role = roles(layer.op).includes(element.role) ? element.role : OPERATIONS[layer.op].output;
  const within = (/** @type {number} */ value, /** @type {number} */ size) => Math.max(0, Math.min(value, size - 1));
  const at = axes.map((axis, index) => within(element.at[index] ?? 0, sizeOn(axis, role)));
  const [i, o] = [within(element.i, layer.i), within(element.o, bias ? layer.i : layer.o)];
  return { role, n: within(element.n, layer.n), i: bias ? o : i, o, at };
}

/** @param {State} state @returns {string} */
export function fragment({ layer, element, values }) {
  const start = withRank(plain(layer.op), layer.src.length);
  const parts = [`op=${layer.op}`];
  for (const name of Object.keys(LISTS)) {
    const list = layer[/** @type {keyof typeof LISTS} */ (name)];
    if (String(list) !== String(start[/** @type {keyof typeof LISTS} */ (name)]))
      parts.push(`${name}=${list.join("x")}`);
  }
  for (const name of [...NUMBERS, .../** @type {(keyof typeof CHOICES)[]} */ (Object.keys(CHOICES))]) {
    if (layer[name] !== start[name]) parts.push(`${name}=${layer[name]}`);
  }
  parts.push(`at=${element.role}:${element.at.join("x")}`);
  if (element.n || element.i || element.o) parts.push(`of=${element.n}x${element.i}x${element.o}`);
  if (values !== "counting") parts.push(`values=${values}`);
  return `#${parts.join("&")}`;
}

/**
 * Read a fragment. A part that is no state gives the default and a note that names it.
 * @param {string} text @returns {{state: State, note: string}}
 */
export function parse(text) {
  try {
    return { state: text.length > 1 ? read(text.slice(1)) : initial(), note: "" };
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return { state: initial(), note: `The address names no layer: ${error.message}. This is the default.` };
  }
}

/** @param {string} name @returns {name is Layer["op"]} */
const isOperation = (name) => Object.hasOwn(OPERATIONS, name);

/** @param {string} text @returns {State} */
function read(text) {
  if (text.length > LONGEST) throw new RangeError(`it has ${text.length} characters, but at most ${LONGEST} are read`);
  const given = new Map(text.split("&").map((part) => /** @type {[string, string]} */ (cut(part, "="))));
  const op = given.get("op") ?? initial().layer.op;
  if (!isOperation(op)) throw new RangeError("op is no operation");
  const state = initial(op);
  const listed = [...given.keys()].find((name) => Object.hasOwn(LISTS, name));
  const rank = listed ? (given.get(listed) ?? "").split("x").length : state.layer.src.length;
  if (rank > 3) throw new RangeError(`${listed} has ${rank} axes, but must have 1 to 3`);
  state.layer = withRank(state.layer, rank);
  state.element = first(state.layer);
  const layer = /** @type {Record<string, unknown>} */ (/** @type {unknown} */ (state.layer));
  for (const [name, value] of given) {
    if (Object.hasOwn(LISTS, name))
      layer[name] =
        value === "" && name === "dst"
          ? []
          : numbers(name, value, rank, LISTS[/** @type {keyof typeof LISTS} */ (name)]);
    else if (/** @type {readonly string[]} */ (NUMBERS).includes(name)) [layer[name]] = numbers(name, value, 1, 1);
    else if (Object.hasOwn(CHOICES, name))
      layer[name] = choice(name, value, CHOICES[/** @type {keyof typeof CHOICES} */ (name)]);
    else if (name === "values") state.values = choice(name, value, KINDS);
    else if (!["op", "at", "of"].includes(name)) throw new RangeError("it has a part that is no field");
  }
  if (OPERATIONS[op].bias) state.layer.o = state.layer.i;
  if (given.has("at")) {
    const [role, at] = cut(given.get("at") ?? "", ":");
    state.element.role = /** @type {Element["role"]} */ (choice("at", role, roles(op)));
    state.element.at = numbers("at", at, rank, 0);
  }
  if (given.has("of")) {
    const of = numbers("of", given.get("of") ?? "", 3, 0);
    Object.assign(state.element, { n: of[0], i: of[1], o: of[2] });
  }
  return { ...state, element: clamped(state.layer, state.element) };
}

/** @param {string} text @param {string} at @returns {[string, string]} */
function cut(text, at) {
  const [first = "", ...others] = text.split(at);
  return [first, others.join(at)];
}

/** @param {string} name @param {string} text @param {number} count @param {number} least @returns {number[]} */
function numbers(name, text, count, least) {
  const found = text.split("x");
  if (found.length !== count) throw new RangeError(`${name} has ${found.length} numbers, but must have ${count}`);
  return found.map((each) => {
    const value = /^\d{1,6}$/.test(each) ? Number(each) : -1;
    if (value < least || value > MOST) throw new RangeError(`${name} must be from ${least} to ${MOST}`);
    return value;
  });
}

/** @template {string} Word @param {string} name @param {string} value @param {readonly Word[]} words @returns {Word} */
function choice(name, value, words) {
  const found = words.find((word) => word === value);
  if (!found) throw new RangeError(`${name} must be one of ${words.join(", ")}`);
  return found;
}
