/** What the service says about a layer: whether it is valid, what it is, how it is computed, and its result. */

import { nameOf, OPERATIONS } from "./arithmetic.js";
import { isAway, rpc } from "./call.js";
import { ServiceError, send, Unreachable } from "./client.js";
import { pause } from "./job.js";
import { request } from "./layer.js";
import { make } from "./make.js";
import { resolvedFacts } from "./resolved.js";
import { decode, withData } from "./values.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Resolved} Resolved */
/** @typedef {import("./values.js").Values} Values */

/** @param {string} id @returns {HTMLElement} */
const at = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

export class Verdict {
  /**
   * @param {import("./fields.js").Fields} fields which broken rules are shown beside
   * @param {(values: Values) => void} computed is told the numbers of all tensors
   */
  constructor(fields, computed) {
    this.fields = fields;
    this.computed = computed;
    this.asking = new AbortController();
  }

  /** Have the service check a layer, and compute it on its numbers if there are any. Only the last question is answered. @param {Layer} layer @param {Resolved} resolved @param {Values | null} inputs */
  async ask(layer, resolved, inputs) {
    this.asking.abort();
    this.asking = new AbortController();
    const { signal } = this.asking;
    at("resolved").classList.add("old");
    try {
      await pause(120, signal);
      for (;;) {
        try {
          await this.answer(layer, resolved, inputs, signal);
          return;
        } catch (error) {
          if (!(error instanceof ServiceError || error instanceof Unreachable) || signal.aborted) throw error;
          this.refuse(error);
          if (!isAway(error)) return;
          await pause(2000, signal);
        }
      }
    } catch (error) {
      if (!signal.aborted) throw error;
    }
  }

  /** @param {Layer} layer @param {Resolved} resolved @param {Values | null} inputs @param {AbortSignal} signal */
  async answer(layer, resolved, inputs, signal) {
    const { op, ...params } = request(layer);
    const result = await rpc("ops.validate", { op, ...params }, signal);
    signal.throwIfAborted();
    this.show("Valid", []);
    const facts = resolvedFacts(params.inputs, result);
    at("resolved").replaceChildren(...facts.layer);
    at("plan").replaceChildren(...facts.plan);
    if (!inputs) return;
    const { attributes } = params;
    const { outputs } = await rpc(op, { attributes, inputs: withData(layer, resolved, inputs) }, signal);
    signal.throwIfAborted();
    const role = OPERATIONS[op].output;
    const { dtype, data } = outputs[nameOf(op, role)];
    this.computed({ ...inputs, [role]: decode(dtype, data) });
  }

  /** @param {ServiceError | Unreachable} error */
  refuse(error) {
    if (error instanceof Unreachable)
      return this.show("The service does not answer. Everything typed is kept, and it is asked again.", []);
    const { problems, message } = error;
    const text =
      problems.length > 1 ? `Invalid: ${problems.length} rules are broken` : problems.length ? "Invalid" : message;
    return this.show(text, problems);
  }

  /** @param {string} text @param {import("./client.js").Problem[]} problems */
  show(text, problems) {
    const valid = text === "Valid";
    this.fields.mark(problems);
    at("verdict").className = valid ? "good" : "bad";
    at("verdict").textContent = text;
    at("problems").replaceChildren(...problems.map(({ msg }) => make("li", {}, msg)));
    for (const id of ["resolved", "plan"]) at(id).classList.toggle("old", !valid);
  }
}

/** Ask again and again whether the service is ready. */
export async function watch() {
  for (;;) {
    try {
      const reply = await (await send("/readyz", { accepted: [503] })).json();
      at("status").textContent =
        reply.status === "starting" ? `starting (${Math.round(reply.progress * 100)} % of the kernels)` : reply.status;
    } catch (error) {
      if (!(error instanceof ServiceError || error instanceof Unreachable || error instanceof SyntaxError)) throw error;
      at("status").textContent = "not responding";
    }
    await pause(document.hidden ? 30000 : 5000);
  }
}
