/** Calls with tensors in files: what is asked before the data are sent, and the body that sends them. */

import { lock, post, ServiceError, send, Unreachable } from "./client.js";
import { request } from "./layer.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./npy.js").Header} Header */

/** The error in a JSON-RPC response, or in a frame. @param {{message: string, data?: object}} error @returns {ServiceError} */
export const failure = ({ message, data }) => new ServiceError({ ...data, detail: message });

/**
 * Call a method; return its result.
 * @param {string} method @param {object} params @param {AbortSignal} signal @returns {Promise<any>} @throws {ServiceError | Unreachable | DOMException}
 */
export async function rpc(method, params, signal) {
  const { result, error } = await post("/rpc", { jsonrpc: "2.0", id: 1, method, params }, { signal });
  if (!error) return result;
  const fault = failure(error);
  if (fault.code === "unauthorised") lock.dispatchEvent(new Event("locked"));
  throw fault;
}

/** The request object of a layer on given files. @param {Layer} layer @param {Map<string, Header>} files @returns {ReturnType<typeof request>} */
export function requestWith(layer, files) {
  const asked = request(layer);
  for (const [name, { dtype, shape }] of files) if (name in asked.inputs) asked.inputs[name] = { dtype, shape };
  return asked;
}

/**
 * Send a request object and its tensors to a path under the operation's.
 * @param {ReturnType<typeof request>} asked @param {Map<string, Blob>} tensors as `.npy` files @param {{path?: string, accept: string, options?: object, signal: AbortSignal}} more
 * @returns {Promise<Response>} @throws {ServiceError | Unreachable | DOMException}
 */
export function sendTensors({ op, attributes, inputs }, tensors, { path = "", accept, options, signal }) {
  // A file can't say that it is bf16.
  const named = Object.entries(inputs).filter(([, { dtype }]) => dtype === "bf16");
  const body = new FormData();
  body.append(
    "request",
    JSON.stringify({
      attributes,
      options,
      inputs: Object.fromEntries(named.map(([name]) => [name, { dtype: "bf16" }])),
    }),
  );
  for (const [name, file] of tensors) body.append(name, file, `${name}.npy`);
  return send(`/v1/ops/${op}${path}`, { method: "POST", headers: { accept }, body, signal });
}

/** Whether an error passes by itself: nobody answers, or the service starts or stops. @param {unknown} error @returns {boolean} */
export const isAway = (error) =>
  error instanceof Unreachable ||
  (error instanceof ServiceError && (error.code === "shutting_down" || error.reason === "starting"));
