/** A layer as the service resolves it. */

import { make } from "./make.js";

/**
 * What Winograd's algorithm costs, or the rules that the layer breaks; nothing for sums of a bias.
 * @param {{allowed: boolean, gmac?: number, refused?: {attribute: string, rule: string}[]} | undefined} found @returns {string}
 */
function winogradText(found) {
  if (found?.allowed) return `${wholeText(found.gmac ?? 0)} multiply-adds`;
  const refused = found?.refused ?? [];
  if (!refused.length || refused.some(({ attribute }) => attribute === "op")) return "";
  return `not possible: ${refused.map(({ rule }) => rule).join("; ")}`;
}

/** @param {number} gmac @returns {string} */
const wholeText = (gmac) => Math.round(gmac * 1e9).toLocaleString("en");

/**
 * What a reply of `ops.validate` says, as the entries of two lists of descriptions: what the layer is, and how it is computed.
 * @param {import("./layer.js").Request["inputs"]} inputs @param {any} result @returns {{layer: HTMLElement[], plan: HTMLElement[]}}
 */
export function resolvedFacts(inputs, result) {
  const shapes = Object.fromEntries(
    Object.entries({ ...inputs, ...result.outputs }).map(([name, { dtype, shape }]) => [
      name,
      `${dtype} [${shape.join(", ")}]`,
    ]),
  );
  const { kernel, gmac, units, tiles, scratch_bytes, refusals = [], winograd } = result.plan ?? {};
  return {
    layer: entries({
      ...shapes,
      "multiply-adds": gmac === undefined ? undefined : wholeText(gmac),
      warnings: result.warnings?.join(" "),
    }),
    plan: entries({
      ...result.resolved,
      kernel,
      units,
      tiles,
      scratch: scratch_bytes === undefined ? undefined : `${scratch_bytes.toLocaleString("en")} bytes`,
      "by Winograd's algorithm": winogradText(winograd),
      refusals: refusals
        .map((/** @type {unknown} */ each) =>
          typeof each === "string" ? each : Object.values(/** @type {object} */ (each)).join(": "),
        )
        .join("; "),
    }),
  };
}

/** @param {Record<string, unknown>} facts @returns {HTMLElement[]} */
const entries = (facts) =>
  Object.entries(facts)
    .filter(([, value]) => value !== undefined && value !== "")
    .map(([name, value]) =>
      make(
        "div",
        { class: name.length + String(value).length > 36 ? "wide" : "" },
        make("dt", {}, name),
        make("dd", {}, Array.isArray(value) ? `[${value.join(", ")}]` : String(value)),
      ),
    );
