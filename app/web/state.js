/** The state of the page as the fragment of its address: `#op=ConvTranspose&src=4x4&at=dst:2x3`. */

import { middle, nameOf, OPERATIONS, resolve, roles, sizeOn } from "./arithmetic.js";
import { DATA, inputsOf, typedIn, typedName } from "./generate.js";
import { CHOICES, LISTS, MOST, NUMBERS, plain, withRank } from "./layer.js";
import { elementOf } from "./maps.js";
import { readNumber } from "./values.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Role} Role */
/** @typedef {import("./generate.js").Given} Given */
/** @typedef {{layer: Layer, element: Element, given: Given}} State */

const LONGEST = 2000;
const KINDS = /** @type {(keyof typeof DATA)[]} */ (Object.keys(DATA));
/** Names that the page shows for what the address calls otherwise; tensors have the names of the operation. @type {Record<string, string>} */
const SHOWN = { operation: "op", images: "n", channels: "i", I: "i", O: "o", taps: "kernel", numbers: "values" };

/** The state that the parts of an address change. @param {Layer} layer @returns {State} */
const start = (layer) => ({ layer, element: first(layer), given: { kind: "counting", seed: 1, typed: {} } });

/** The state of a page without a fragment: an ordinary 3 x 3. @returns {State} */
export const initial = () => start({ ...plain("Convolution"), strides: [1, 1] });

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

/** The state as a fragment; without the typed numbers where they make it too long. @param {State} state @returns {{text: string, whole: boolean}} */
export function fragment({ layer, element, given }) {
  const plainest = withRank(plain(layer.op), layer.src.length);
  const parts = [`op=${layer.op}`];
  for (const name of Object.keys(LISTS)) {
    const list = layer[/** @type {keyof typeof LISTS} */ (name)];
    if (String(list) !== String(plainest[/** @type {keyof typeof LISTS} */ (name)]))
      parts.push(`${name}=${list.join("x")}`);
  }
  for (const name of [...NUMBERS, .../** @type {(keyof typeof CHOICES)[]} */ (Object.keys(CHOICES))]) {
    if (layer[name] !== plainest[name]) parts.push(`${name}=${layer[name]}`);
  }
  parts.push(`at=${nameOf(layer.op, element.role)}:${element.at.join("x")}`);
  if (element.n || element.i || element.o) parts.push(`of=${element.n}x${element.i}x${element.o}`);
  if (given.kind !== "counting") parts.push(`values=${given.kind}`);
  if (given.seed !== 1) parts.push(`seed=${given.seed}`);
  const short = `#${parts.join("&")}`;
  const kept = Object.entries(given.typed).flatMap(([name, value]) => {
    const role = inputsOf(layer.op).find((input) => typedIn(resolve(layer), input, { [name]: value }).size);
    return role ? [`${nameOf(layer.op, role)}${name.slice(role.length)}:${value}`] : [];
  });
  const text = kept.length ? `${short}&typed=${kept.join(",")}` : short;
  return text.length > LONGEST ? { text: short, whole: false } : { text, whole: true };
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
  const written = new Map(
    decoded(text)
      .split("&")
      .map((part) => cut(part, "=")),
  );
  const op = written.get("op") ?? written.get("operation") ?? "Convolution";
  if (!isOperation(op)) throw new RangeError("op is no operation");
  const given = new Map([...written].map(([name, value]) => [fieldOf(op, name), value]));
  const state = start(plain(op));
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
    else if (name === "values") state.given.kind = choice(name, value, KINDS);
    else if (name === "seed") [state.given.seed = 1] = numbers(name, value, 1, 0, 999999);
    else if (!["op", "at", "of", "typed"].includes(name)) throw new RangeError("it has a part that is no field");
  }
  if (OPERATIONS[op].bias) state.layer.o = state.layer.i;
  if (given.has("at")) state.element = pointed(state, given.get("at") ?? "");
  if (given.has("of")) {
    const of = numbers("of", given.get("of") ?? "", 3, 0);
    Object.assign(state.element, { n: of[0], i: of[1], o: of[2] });
  }
  if (given.has("typed")) state.given.typed = typed(state.layer, given.get("typed") ?? "");
  return { ...state, element: clamped(state.layer, state.element) };
}

/** @param {string} text @returns {string} */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    throw new RangeError("it is no text");
  }
}

/** The field that a name in the address is of. @param {Layer["op"]} op @param {string} name @returns {string} */
function fieldOf(op, name) {
  if (Object.hasOwn(SHOWN, name)) return SHOWN[name] ?? name;
  const role = roleOf(op, name);
  if (role === "weights") return "kernel";
  return role === "dst" && op === "BiasAddBackward" ? "src" : (role ?? name);
}

/** The role of a tensor by its name, or by the role's. @param {Layer["op"]} op @param {string} name @returns {Role | undefined} */
const roleOf = (op, name) => roles(op).find((role) => role === name || nameOf(op, role) === name);

/** An element as `dst:2x3`, its place on the spatial axes, or as the page writes it: `dst[0, 0, 2, 3]`. @param {State} state @param {string} text @returns {Element} */
function pointed({ layer, element }, text) {
  const [name, place] = cut(text.replace("[", ":").replace("]", "").replace(/, */g, "x"), ":");
  const role = choice("at", roleOf(layer.op, name) ?? "", roles(layer.op), (each) => nameOf(layer.op, each));
  const whole = resolve(layer).shapes[role].length;
  const length = place.split("x").length;
  if (length !== layer.src.length && length !== whole)
    throw new RangeError(
      `at has ${length} numbers, but must have ${layer.src.length}, or ${whole} with image and channels`,
    );
  const at = numbers("at", place, length, 0);
  return length === whole ? elementOf(layer, role, at, element) : { ...element, role, at };
}

/** Typed numbers as `src:0x0x1x2:-3.5,weights:..`. @param {Layer} layer @param {string} text @returns {Given["typed"]} */
function typed(layer, text) {
  const { op } = layer;
  /** @type {Given["typed"]} */
  const found = {};
  for (const each of text.split(",")) {
    const [name = "", index = "", value = ""] = each.split(":");
    const role = choice("typed", roleOf(op, name) ?? "", inputsOf(op), (input) => nameOf(op, input));
    const number = readNumber(layer.dtype, value);
    if (number === null) throw new RangeError(`typed must have numbers of ${layer.dtype}`);
    const shape = resolve(layer).shapes[role];
    const at = numbers("typed", index, shape.length, 0);
    const one = { [typedName(role, at)]: number };
    if (!typedIn(resolve(layer), role, one).size)
      throw new RangeError(`typed must have indices within ${shape.join("x")}`);
    Object.assign(found, one);
  }
  return found;
}

/** @param {string} text @param {string} at @returns {[string, string]} */
function cut(text, at) {
  const [first = "", ...others] = text.split(at);
  return [first, others.join(at)];
}

/** @param {string} name @param {string} text @param {number} count @param {number} least @param {number} [most] @returns {number[]} */
function numbers(name, text, count, least, most = MOST) {
  const found = text.split("x");
  if (found.length !== count) throw new RangeError(`${name} has ${found.length} numbers, but must have ${count}`);
  return found.map((each) => {
    const value = /^\d{1,6}$/.test(each) ? Number(each) : -1;
    if (value < least || value > most) throw new RangeError(`${name} must be from ${least} to ${most}`);
    return value;
  });
}

/** @template {string} Word @param {string} name @param {string} value @param {readonly Word[]} words @param {(word: Word) => string} [shown] @returns {Word} */
function choice(name, value, words, shown = (word) => word) {
  const found = words.find((word) => word === value);
  if (!found) throw new RangeError(`${name} must be one of ${words.map(shown).join(", ")}`);
  return found;
}
