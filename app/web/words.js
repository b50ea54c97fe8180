/** What a drawing shows, in words: the twin of every drawing for people who don't see it. */

import { combinations, indexOf, letterOf, nameOf, OPERATIONS, reach, roles } from "./arithmetic.js";
import { inputsOf } from "./generate.js";
import { numberOf, shortest } from "./values.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Resolved} Resolved */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Role} Role */
/** @typedef {import("./values.js").Values} Values */

/** @param {number} count @param {string} thing @param {string} [things] */
const many = (count, thing, things = `${thing}s`) => `${count.toLocaleString("en")} ${count === 1 ? thing : things}`;

/** The name and index of an element: `src[0, 1, 2]`. @param {Layer} layer @param {Element} element @returns {string} */
export const label = (layer, element) => `${nameOf(layer.op, element.role)}[${indexOf(layer, element).join(", ")}]`;

/** How many products an element takes part in, and how many positions are padding. @param {Layer} layer @param {Resolved} resolved @param {Element} element @returns {string} */
export function told(layer, resolved, element) {
  const { inside, padded, times } = reach(layer, resolved, element);
  const output = OPERATIONS[layer.op].output;
  if (resolved.bias) return biasTold(layer, resolved, element);
  const repeated = element.role === "weights" ? many(times, "image") : many(times, "channel");
  const things = element.role === "weights" ? many(inside, "pair", "pairs") : many(inside, "tap");
  const counted =
    times > 1 ? `${many(inside * times, "product")}: ${things} times ${repeated}` : many(inside, "product");
  const verb = element.role === output ? "sums" : "takes part in";
  const first = inside
    ? `${label(layer, element)} ${verb} ${counted}.`
    : `${label(layer, element)} ${verb} nothing${element.role === output ? ": it is 0" : ""}.`;
  const more = padded
    ? ` ${many(padded, "more position falls", "more positions fall")} into the padding${times > 1 ? " of each" : ""} and ${padded === 1 ? "adds" : "add"} nothing.`
    : "";
  return first + more;
}

/** @param {Layer} layer @param {Resolved} resolved @param {Element} element @returns {string} */
function biasTold(layer, resolved, element) {
  const { inside, times } = reach(layer, resolved, element);
  const count = many(inside * times, "element");
  const name = label(layer, element);
  if (layer.op === "BiasAddBackward")
    return element.role === "weights"
      ? `${name} sums ${count} of diff_dst.`
      : `${name} is added to diff_bias[${element.o}].`;
  return element.role === "weights"
    ? `${name} is added to ${count} of dst.`
    : element.role === "dst"
      ? `${name} is one element of src plus one of bias.`
      : `${name} is added to one element of dst.`;
}

/**
 * The sum of an element with its numbers, as pieces of text; `lit` is the piece of the product that is shown.
 * @param {Layer} layer @param {Resolved} resolved @param {Values} values @param {Record<Role, Element>[]} terms the first ones
 * @param {number} at the product shown, or -1 @param {number} count of all products
 * @returns {{before: string, lit: string, after: string}}
 */
export function sumText(layer, resolved, values, terms, at, count) {
  const inputs = inputsOf(layer.op);
  const sign = resolved.bias ? " + " : " * ";
  const shown = 12;
  const from = at < 0 ? 0 : Math.max(0, Math.min(at - shown / 2, terms.length - shown));
  const pieces = terms.slice(from, from + shown).map((term) => {
    const numbers = inputs.map((role) => shortest(layer.dtype, numberOf(layer, resolved, values, term[role]) ?? 0));
    return numbers.map((number, index) => (index && number.startsWith("-") ? `(${number})` : number)).join(sign);
  });
  const lit = at < 0 ? -1 : at - from;
  const rest = count - from - pieces.length;
  const before = pieces
    .slice(0, Math.max(0, lit))
    .map((piece) => `${piece} + `)
    .join("");
  const after = pieces.slice(lit + 1).join(" + ");
  return {
    before: `${from ? ".. + " : ""}${lit < 0 ? "" : before}`,
    lit: pieces[lit] ?? "",
    after: `${lit >= 0 && after ? " + " : ""}${after}${rest > 0 ? ` + .. ${many(rest, "more")}` : ""}`.replace(
      /mores$/,
      "more",
    ),
  };
}

/**
 * Rows for a table: what of each tensor takes part with an element, and how its positions follow from each other.
 * @param {Layer} layer @param {Resolved} resolved @param {Element} element @returns {string[][]}
 */
export function rows(layer, resolved, element) {
  const { real, all } = reach(layer, resolved, element);
  return roles(layer.op).map((role) => {
    const name = nameOf(layer.op, role);
    if (role === element.role) return [name, label(layer, element), "this element"];
    const letter = letterOf(resolved, role);
    const positions = combinations(real, 24).map((met) => `(${met.map((each) => each[letter]).join(", ")})`);
    const distinct = [...new Set(positions)];
    const count = real.reduce((total, met) => total * new Set(met.map((each) => each[letter])).size, 1);
    const outside = all.map((met) =>
      met.filter((each) => !real.some((axis) => axis.includes(each))).map((each) => each[letter]),
    );
    const padding =
      letter === "y" && outside.some((axis) => axis.length)
        ? outside
            .map((axis, index) => (axis.length ? `axis ${index}: ${axis.join(", ")}` : ""))
            .filter(Boolean)
            .join("; ")
        : "";
    return [
      name,
      distinct.join(" ") +
        (count > distinct.length ? ` and ${many(count - distinct.length, "more")}`.replace(/mores$/, "more") : "") ||
        "none",
      padding,
    ];
  });
}

/** What the axes of a layer look like. @param {Layer} layer @param {Resolved} resolved @returns {string[]} */
export function axes(layer, resolved) {
  if (resolved.bias) return [];
  const [wide, narrow] = (resolved.transposed ? ["dst", "src"] : ["src", "dst"]).map((role) =>
    nameOf(layer.op, /** @type {Role} */ (role)),
  );
  return resolved.axes.map((axis, index) => {
    const extra = axis.extra ? `; its last ${axis.extra} are output padding` : "";
    return (
      `Axis ${index}: ${axis.kernel} taps, ${axis.dilation} apart, span ${axis.span} positions and step by ${axis.stride} over the ${axis.wide} of ` +
      `${wide}${extra}, with ${axis.begin} of padding before and ${axis.end} after; ${narrow} has ${axis.narrow}.`
    );
  });
}
