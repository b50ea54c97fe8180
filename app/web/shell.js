/** A call as commands for a shell: what they print or write is what Run computes. */

import { nameOf, OPERATIONS, product } from "./arithmetic.js";
import { lines } from "./values.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/**
 * A call whose inputs have numbers, or are files.
 * @typedef {object} Call
 * @property {Layer["op"]} op
 * @property {Record<string, unknown>} attributes
 * @property {Record<string, {dtype: string, shape: number[], numbers?: Float32Array, file?: string}>} inputs
 * @property {object} options
 * @property {string} origin of the service
 * @property {boolean} keyed whether it requires a key
 */

/** Most numbers that are written in a call; larger inputs are files. */
const WRITTEN = 1000;

/**
 * A request with the numbers that a call is written with.
 * @param {import("./layer.js").Request} request @param {Record<string, Float32Array> | null} numbers @param {Map<string, string>} files the names of those that are chosen
 * @param {Pick<Call, "options" | "origin" | "keyed">} how @returns {Call}
 */
export function callOf({ op, attributes, inputs }, numbers, files, how) {
  const sizes = Object.values(inputs).map(({ shape }) => product(shape));
  const written = numbers && !files.size && sizes.reduce((all, size) => all + size) <= WRITTEN;
  const given = Object.entries(inputs).map(([name, spec]) => [
    name,
    { ...spec, ...(written ? { numbers: numbers[name] } : { file: files.get(name) ?? `${name}.npy` }) },
  ]);
  return { op, attributes, inputs: Object.fromEntries(given), ...how };
}

/** What has to be saved first. @param {Call} call @returns {string} */
export function note({ inputs }) {
  const files = Object.entries(inputs).flatMap(([name, { file }]) => (file === `${name}.npy` ? [file] : []));
  return files.length ? `# Under Run, save ${files.join(" and ")} here first.\n` : "";
}

/** JSON with a line for each member, short lists in one line, and numbers in rows. @param {unknown} value @returns {string} */
function json(value) {
  /** @type {string[]} */
  const data = [];
  /** @this {{dtype: string, shape: number[]}} @param {string} _ @param {unknown} each */
  function rows(_, each) {
    return each instanceof Float32Array ? `@${data.push(lines(this.dtype, this.shape, each)) - 1}` : each;
  }
  return JSON.stringify(value, rows, 1)
    .replace(/\[[^[\]{}]*\]/g, (list) => list.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"))
    .replace(/"@(\d+)"/g, (_, at) => `[${data[at]}]`);
}

/** @param {string} text */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** @param {Call} call @param {string} path @param {string} [flags] */
const sent = ({ origin, keyed }, path, flags = "-sS") =>
  `curl ${flags} ${origin}${path}${keyed ? ' \\\n  -H "X-API-Key: $CONVGRAD_API_KEY"' : ""}`;

/** @param {Call} call @returns {string} */
export function curl(call) {
  const { op, attributes, inputs } = call;
  const path = `/v1/ops/${op}`;
  const files = Object.entries(inputs).filter(([, { file }]) => file);
  if (!files.length)
    return `${sent(call, path)} \\\n  -H 'Content-Type: application/json' -d ${quoted(json(body(call)))}`;
  // A .npy file can't say that it is bf16.
  const named = files.filter(([, { dtype }]) => dtype === "bf16").map(([name, { dtype }]) => [name, { dtype }]);
  const request = { attributes, inputs: Object.fromEntries(named), options: call.options };
  const parts = files.map(([name, { file = "" }]) => `-F ${quoted(`${name}=@"${file.replace(/["\\]/g, "\\$&")}"`)}`);
  const output = `${nameOf(op, OPERATIONS[op].output)}.npy`;
  return `${note(call)}${sent(call, path, "-sSf")} \\\n  -H 'Accept: application/x-npy' -o ${output} \\\n  -F ${quoted(`request=${json(request)}`)} \\\n  ${parts.join(" ")}`;
}

/** @param {Call} call @returns {string} */
export function jsonRpc(call) {
  const { op, inputs } = call;
  const asked = json({ jsonrpc: "2.0", id: 1, method: op, params: body(call) });
  const start = `${sent(call, "/rpc")} -H 'Content-Type: application/json' -d`;
  const files = Object.values(inputs).flatMap(({ file }) => file ?? []);
  if (!files.length) return `${start} ${quoted(asked)}`;
  const read = files.map((file) => `"$(base64 < ${quoted(file)} | tr -d '\\n')"`);
  return `${note(call)}printf ${quoted(asked)} \\\n  ${read.join(" ")} |\n${start} @-`;
}

/** A call as JSON has it; files leave their place to printf. @param {Call} call */
function body({ attributes, inputs, options }) {
  const tensors = Object.entries(inputs).map(([name, { dtype, shape, numbers, file }]) => [
    name,
    file ? { npy: "%s", ...(dtype === "bf16" ? { dtype } : {}) } : { dtype, shape, data: numbers },
  ]);
  return { attributes, inputs: Object.fromEntries(tensors), options: { ...options, encoding: "list" } };
}
