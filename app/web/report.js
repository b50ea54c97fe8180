/** The report of a verification in words. */

/** A number, or the name of one that JSON has not. @typedef {number | "inf" | "-inf" | "nan"} Num */
/** @typedef {{rule: string, passed: boolean, elements: number, measured: Num, limit: number | null, text: string}} Rule */
/** @typedef {{index: number[], got: Num, expected: Num, exact: Num, ulp: number, share: Num, terms: number, largest: {at: number[][], value: Num}[]}} Worst */
/** @typedef {{shape: number[], values: any}} ErrorMap */
/**
 * @typedef {object} Report
 * @property {boolean} passed
 * @property {string} op
 * @property {string} output
 * @property {string} dtype
 * @property {number[]} shape
 * @property {number} elements
 * @property {number} unequal
 * @property {Rule[]} rules
 * @property {{text: string}[]} causes
 * @property {{text: string} | null} where
 * @property {string[]} hints
 * @property {Worst | null} worst
 * @property {string[]} factors
 * @property {{every_element: number, one_element: number, products: number, product_bits: number | null}} detection
 * @property {Record<string, ErrorMap>} maps
 * @property {{compute_ms: number}} stats
 * @property {{passed: boolean, count: number, exact: boolean | null, mean_square: {measured: Num, limit: number}, largest: {measured: Num}, checked: {first: number[], shape: number[], elements: number}}} [projections]
 */

/** @param {Num} value @returns {number} */
export const number = (value) =>
  typeof value === "number" ? value : { inf: Infinity, "-inf": -Infinity, nan: Number.NaN }[value];

/** @param {Num} value @param {number} [digits] @returns {string} */
export function short(value, digits = 4) {
  const found = number(value);
  if (Number.isNaN(found)) return "NaN";
  if (!Number.isFinite(found)) return found > 0 ? "Inf" : "-Inf";
  const rounded = Number(found.toPrecision(digits));
  return Math.abs(rounded) < 1e6 ? String(rounded) : rounded.toExponential(digits - 1);
}

/** @param {Report} report @returns {string} */
export const verdict = ({ output, dtype, shape, passed }) =>
  `${output}, ${dtype} [${shape.join(", ")}]: ${passed ? "passed" : "FAILED"}`;

/** What a rule found, with its two numbers. @param {Rule} rule @returns {string} */
export function found({ rule, passed, measured, limit, elements }) {
  if (rule === "exact")
    return `${measured} of ${elements} elements whose sums are exact have wrong bits, at most ${limit} may`;
  if (rule === "mean_square")
    return `squared errors are ${short(measured)} times the expected, at most ${short(limit ?? 0)}`;
  if (rule === "largest") return `the largest error is ${short(measured)} times what is allowed, at most ${limit}`;
  return passed
    ? "no known loss of precision shows"
    : `the errors are those of a known fault, with a correlation of ${short(measured)}`;
}

/** The rules that judged something, the broken ones first. @param {Report} report @returns {Rule[]} */
export const judged = ({ rules }) =>
  rules
    .filter(({ elements, passed }) => elements || !passed)
    .sort((one, other) => Number(one.passed) - Number(other.passed));

/** How much the verdict could see. @param {Report} report @returns {string} */
export function detection({ detection: { every_element, one_element, products } }) {
  if (one_element === 0) return "Detection limit: none, one wrong bit would have been found.";
  const [every, one] = [every_element, one_element].map((share) =>
    share * products < 1
      ? `one missing product of ${products.toLocaleString("en")}`
      : `${short(100 * share, 2)} % of the products missing`,
  );
  return every === one
    ? `Detection limit: ${every}, in every element or in one.`
    : `Detection limit: ${every} in every element, or ${one} in one.`;
}

/** @param {Report} report @returns {string} */
export function worstText({ worst, output }) {
  if (!worst) return "";
  const { index, got, expected, exact, ulp, share } = worst;
  const off = share === "inf" ? "where every bit counts" : `${short(share)} times what is allowed`;
  return `Worst element ${output}[${index.join(", ")}]: got ${short(got)}, expected ${short(expected)} (exactly ${exact}), ${ulp.toLocaleString("en")} ULP off, ${off}.`;
}

/** The largest products of the worst element. @param {Report} report @param {number} most @returns {string[]} */
export function worstTerms({ worst, factors }, most) {
  return (worst?.largest ?? [])
    .slice(0, most)
    .map(
      ({ at, value }) =>
        `${at.map((index, factor) => `${factors[factor]}[${index.join(", ")}]`).join(" * ")} = ${short(value)}`,
    );
}

/** What the projections of a fast verification found; nothing for any other. @param {Report} report @returns {string[]} */
export function projected({ projections }) {
  if (!projections) return [];
  const { passed, count, exact, mean_square, largest, checked } = projections;
  const measured =
    exact === null
      ? `mean square ${short(mean_square.measured)}, at most ${short(mean_square.limit)}; largest ${short(largest.measured)}, at most 1`
      : exact
        ? "all exact"
        : "sums that are exact have wrong bits";
  return [
    `${passed ? "Passed" : "FAILED"}: ${count} random projections of the whole result: ${measured}.`,
    `In full: ${checked.elements.toLocaleString("en")} elements from [${checked.first.join(", ")}] on, which the rest is about.`,
  ];
}

/** The class of an error's colour, by its share of what is allowed: half decades below and above 1. @param {number} share @returns {string} */
export function shareLevel(share) {
  const halves = 2 * Math.log10(share);
  return share > 1 ? `over-${Math.min(6, Math.ceil(halves) || 1)}` : `under-${Math.min(6, Math.floor(-halves))}`;
}
