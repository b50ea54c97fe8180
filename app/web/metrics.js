/** The metrics of a service in the Prometheus text format, and what they say about the time between two readings. */

/** @typedef {{name: string, labels: Record<string, string>, value: number}} Series */
/** One reading; `at` is in seconds. @typedef {{at: number, series: Series[]}} Reading */

/** Phases of a request, in order. */
export const PARTS = /** @type {const} */ (["receive", "decode", "queue", "compute", "encode"]);

const LINE = /^(\w+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** @param {string} text @returns {Series[]} */
export function parse(text) {
  return text.split("\n").flatMap((line) => {
    const [, name, labels = "", value] = LINE.exec(line) ?? [];
    if (name === undefined) return [];
    const found = [...labels.matchAll(LABEL)].map(([, key = "", quoted = ""]) => [
      key,
      quoted.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter)),
    ]);
    return [{ name, labels: Object.fromEntries(found), value: Number(value) }];
  });
}

/**
 * The sum of the series of a name whose labels match, without the prefix `convgrad_`.
 * @param {Series[]} series @param {string} name @param {(labels: Record<string, string>) => boolean} [matches] @returns {number}
 */
export const total = (series, name, matches = () => true) =>
  series.reduce((sum, each) => (each.name === `convgrad_${name}` && matches(each.labels) ? sum + each.value : sum), 0);

/** When the service's process began, in seconds since 1970. @param {Reading} reading @returns {number} */
export const startOf = ({ series }) => series.find(({ name }) => name === "process_start_time_seconds")?.value ?? 0;

/**
 * What happened between two readings: rates in calls a second, work in GFLOP/s, `computing` in workers. `attainable` is the
 * work of all workers if they computed all the time, at the speed that they had; null where nothing was computed. `limit` is what their
 * processors reach in f32.
 * @typedef {{ok: number, failed: number, refused: number, gflops: number, computing: number, attainable: number | null, limit: number}} Rates
 */

/** @param {Reading} before @param {Reading} after @returns {Rates | null} null if the service has restarted */
export function rates(before, after) {
  const seconds = after.at - before.at;
  if (startOf(before) !== startOf(after) || seconds <= 0) return null;
  const grown = difference(before.series, after.series);
  const flops = 2e-9 * grown("macs_total");
  const computing = grown("compute_seconds_total");
  return {
    ok: grown("calls_total", ({ outcome }) => outcome === "ok") / seconds,
    failed: grown("calls_total", ({ outcome }) => outcome !== "ok") / seconds,
    refused: grown("refusals_total") / seconds,
    gflops: flops / seconds,
    computing: computing / seconds,
    limit: total(after.series, "worker_gflops_limit") * total(after.series, "workers_wanted"),
    attainable: computing > 0 ? (flops / computing) * total(after.series, "workers_wanted") : null,
  };
}

/**
 * Mean milliseconds of a request, and of each of its phases.
 * @param {Reading | null} before null: since the service began @param {Reading} after
 * @returns {{requests: number, whole: number, parts: number[]} | null} null if there were no requests
 */
export function phases(before, after) {
  const grown = difference(before && startOf(before) === startOf(after) ? before.series : [], after.series);
  const requests = grown("request_seconds_count");
  if (!requests) return null;
  const ms = (/** @type {number} */ seconds) => (1000 * seconds) / requests;
  const parts = PARTS.map((part) => ms(grown("part_seconds_sum", (labels) => labels.part === part)));
  return { requests, whole: ms(grown("request_seconds_sum")), parts };
}

/** How much counters grew. @param {Series[]} before @param {Series[]} after @returns {(name: string, matches?: (labels: Record<string, string>) => boolean) => number} */
const difference = (before, after) => (name, matches) => total(after, name, matches) - total(before, name, matches);
