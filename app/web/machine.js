/** The page `/machine`: what the service does now, from its readiness and its metrics. */

import "./key.js";
import { short } from "./charts.js";
import { answered, lock, ServiceError, send, Unreachable } from "./client.js";
import { make } from "./make.js";
import { PARTS, parse, phases, rates, startOf, total } from "./metrics.js";

/** @typedef {import("./metrics.js").Reading} Reading */
/** @typedef {import("./metrics.js").Rates} Rates */
/** @typedef {{status: string, progress: number, workers: {ready: number, wanted: number}, cause: string | null, target: string, unfit: string[]}} Readiness */
/** @typedef {{reading: Reading, rates: Rates | null}} Second */

/** Seconds that the charts show; there is a reading in each. */
const SHOWN = 120;
/** Seconds that phases are averaged over. */
const RECENT = 10;

/** @param {string} id @returns {HTMLElement} */
const at = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** What is shown of each second; null where the service did not answer. @type {(Second | null)[]} */
const history = [];
/** When the service last answered, and when it last was another process than before. */
let [answeredAt, restartedAt] = [0, 0];

/** @param {string} path @param {number[]} accepted @returns {Promise<Response>} */
const get = (path, accepted = []) => send(path, { accepted, cache: "no-store", signal: AbortSignal.timeout(5000) });

/** Read the state of the service, and show it. */
async function refresh() {
  try {
    /** @type {Readiness} */
    const ready = await answered((await get("/readyz", [503])).json());
    const text = await answered((await get("/metrics")).text());
    const reading = { at: performance.now() / 1000, series: parse(text) };
    const last = history.findLast((each) => each !== null)?.reading;
    if (last && startOf(last) !== startOf(reading)) restartedAt = Date.now();
    history.push({ reading, rates: last && history.at(-1) ? rates(last, reading) : null });
    answeredAt = Date.now();
    at("status").textContent = statusOf(ready);
    showNote(false);
    showFigures(ready, reading);
    showFacts(ready, reading);
  } catch (error) {
    if (!(error instanceof ServiceError || error instanceof Unreachable)) throw error;
    history.push(null);
    at("status").textContent = error instanceof ServiceError ? error.message : "not responding";
    // The last numbers stay: they are from before the service went away.
    showNote(answeredAt > 0);
  }
  document.body.classList.toggle("old", history.at(-1) === null);
  if (history.length > SHOWN) history.shift();
  showCharts();
}

/** Say that the service is away, or has just restarted. @param {boolean} away */
function showNote(away) {
  const text = away
    ? `The service does not answer. The numbers are from ${new Date(answeredAt).toLocaleTimeString("en-GB")}.`
    : Date.now() - restartedAt < 10000
      ? "The service has restarted: its counters began at 0 again."
      : "";
  at("note").textContent = text;
  at("note").hidden = !text;
}

/** @param {Readiness} ready @returns {string} */
const statusOf = ({ status, progress }) =>
  status === "starting" ? `starting (${Math.round(progress * 100)} % of the kernels)` : status;

/** @param {string} name @param {string} value @param {string} [small] */
const figure = (name, value, small = "") =>
  make("div", {}, make("dt", {}, name), make("dd", {}, value, ...(small ? [make("small", {}, ` ${small}`)] : [])));

/** @param {Readiness} ready @param {Reading} reading */
function showFigures({ workers }, { series }) {
  const now = history.at(-1)?.rates;
  const rate = (/** @type {number | undefined} */ value) => (value === undefined ? "\u2013" : short(value));
  const faults = FAULTS.reduce((sum, [name]) => sum + total(series, name), 0);
  at("figures").replaceChildren(
    figure("calls a second", rate(now ? now.ok + now.failed : undefined)),
    figure("in the queue", short(total(series, "calls_open")), `of ${short(total(series, "calls_limit"))}`),
    figure("workers ready", String(workers.ready), `of ${workers.wanted}`),
    figure("GFLOP/s", rate(now?.gflops), now?.limit ? `of ${short(now.limit)} in f32` : ""),
    figure("faults survived", short(faults)),
  );
}

/** Counters of faults, and what each counts. */
const FAULTS = /** @type {const} */ ([
  ["worker_restarts_total", "workers restarted"],
  ["worker_hangs_total", "workers killed: no answer"],
  ["worker_stops_enforced_total", "workers killed: did not stop"],
  ["units_retried_total", "units retried"],
  ["fork_server_restarts_total", "fork server restarted"],
]);

/** @param {Readiness} ready @param {Reading} reading */
function showFacts({ target, unfit, cause }, { series }) {
  const info = (/** @type {string} */ name, /** @type {string} */ label) =>
    series.find((each) => each.name === `convgrad_${name}_info`)?.labels[label] ?? "not known";
  const began = startOf({ at: 0, series });
  const facts = [
    ["version", info("build", "version")],
    ["kernels for", target],
    ["running for", began ? duration(Date.now() / 1000 - began) : "not known"],
    ["units computed", short(total(series, "units_total"))],
    ["calls by algorithm", byAlgorithm(series)],
    ...FAULTS.map(([name, what]) => [what, short(total(series, name))]),
    ["memory refused", short(total(series, "shared_memory_refused_total"))],
    ["paths unfit for this processor", unfit.join("; ") || "none"],
    ["cause of missing workers", cause ?? "none"],
  ];
  at("facts").replaceChildren(
    ...facts.map(([name = "", value = ""]) =>
      make("div", { class: value.length > 40 ? "wide" : "" }, make("dt", {}, name), make("dd", {}, value)),
    ),
  );
}

/** @param {import("./metrics.js").Series[]} series @returns {string} */
const byAlgorithm = (series) =>
  ["direct", "winograd"]
    .map((name) => `${name} ${short(total(series, "algorithm_calls_total", ({ algorithm }) => algorithm === name))}`)
    .join(", ");

/** @param {number} seconds @returns {string} */
function duration(seconds) {
  const [days, hours, minutes] = [
    Math.floor(seconds / 86400),
    Math.floor(seconds / 3600) % 24,
    Math.floor(seconds / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.max(0, Math.floor(seconds))} s`;
}

function showCharts() {
  showChart("calls", {
    ok: ({ rates }) => rates?.ok,
    failed: ({ rates }) => rates?.failed,
    refused: ({ rates }) => rates?.refused,
  });
  showChart("queue", {
    "calls that wait or compute": ({ reading }) => total(reading.series, "calls_open"),
    "units that wait for a worker": ({ reading }) => total(reading.series, "units_waiting"),
  });
  showChart("workers", {
    computing: ({ rates }) => rates?.computing,
    ready: ({ reading }) => total(reading.series, "workers", ({ state }) => state !== "starting"),
  });
  showChart("work", {
    computed: ({ rates }) => rates?.gflops,
    "if all workers computed all the time": ({ rates }) => rates?.attainable,
    "limit of all workers in f32": ({ rates }) => rates?.limit,
  });
  const memory =
    (/** @type {string} */ kept) =>
    (/** @type {Second} */ { reading }) =>
      total(reading.series, "shared_memory_bytes", ({ state }) => state === kept) / 2 ** 20;
  showChart("memory", { used: memory("used"), "kept for reuse": memory("idle") });
  showParts();
}

/** @param {string} id @param {Record<string, (second: Second) => number | null | undefined>} lines */
function showChart(id, lines) {
  const drawn = Object.entries(lines).map(([name, read]) => ({
    name,
    values: history.map((second) => (second && read(second)) ?? null),
  }));
  /** @type {import("./charts.js").TimeChart} */ (at(id)).show(drawn, SHOWN);
}

/** Phases of the last seconds, or of all requests if there were none. */
function showParts() {
  const after = history.at(-1)?.reading;
  if (!after) return;
  const before = history.at(-1 - RECENT)?.reading ?? history[0]?.reading ?? null;
  const recent = before && phases(before, after);
  const found = recent ?? phases(null, after);
  const most = Math.max(1e-9, ...(found?.parts ?? []));
  at("parts").replaceChildren(
    ...PARTS.map((part, index) => {
      const ms = found?.parts[index] ?? 0;
      const bar = make("td");
      bar.innerHTML = `<svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true"><rect width="${(100 * ms) / most}" height="1"/></svg>`;
      return make("tr", {}, make("th", { scope: "row" }, part), bar, make("td", {}, `${short(ms)} ms`));
    }),
  );
  at("whole").textContent = found
    ? `Means of ${short(found.requests)} requests ${recent ? `in the last ${RECENT} s` : "since the service began"}; a whole request took ${short(found.whole)} ms. Phases of a large request overlap.`
    : "There was no request yet.";
}

/** Refresh every second while the page is seen; the charts have no time in which it was not. */
async function run() {
  for (;;) {
    const began = performance.now();
    if (document.hidden) history.length = 0;
    else await refresh();
    await new Promise((done) => setTimeout(done, Math.max(100, 1000 - (performance.now() - began))));
  }
}

lock.addEventListener("unlocked", refresh);
run();
