import "./key.js";
import { answered, send, Unreachable } from "./client.js";

const EVERY_MS = 1000;
const status = /** @type {HTMLElement} */ (document.getElementById("status"));
const facts = /** @type {HTMLElement} */ (document.getElementById("facts"));

/** @typedef {{status: string, progress: number, workers: {ready: number, wanted: number}, cause: string | null, target: string, unfit: string[]}} Readiness */

/** @param {Readiness} ready */
function show(ready) {
  status.textContent = ready.status;
  const rows = [
    ["workers ready", `${ready.workers.ready} of ${ready.workers.wanted}`],
    ["kernels compiled", `${Math.round(100 * ready.progress)} %`],
    ["target", ready.target],
    ["unfit targets", ready.unfit.join("; ") || "none"],
    ["cause", ready.cause ?? "none"],
  ];
  facts.replaceChildren(...rows.flatMap(([name, value]) => [element("dt", name ?? ""), element("dd", value ?? "")]));
}

/** @param {string} tag @param {string} text */
function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

async function refresh() {
  try {
    show(await answered((await send("/readyz", { accepted: [503] })).json()));
  } catch (error) {
    // The last facts stay: they are what was true before the service went away.
    status.textContent = error instanceof Unreachable ? "not responding" : String(error);
  }
  setTimeout(refresh, EVERY_MS);
}

refresh();
