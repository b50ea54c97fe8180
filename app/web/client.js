/**
 * The service's HTTP API for the pages. The API key, where one is required, is kept in memory alone.
 *
 * @typedef {{loc: (string | number)[], msg: string, type: string}} Problem a broken rule and its place in the request
 */

/** The service answered with an error: `message` is its own sentence, `problems` every broken rule. */
export class ServiceError extends Error {
  /** @param {{status?: number, code?: string, detail?: string, reason?: string, errors?: Problem[]}} reply a problem document */
  constructor({ status = 0, code = "unknown", detail = "the service gave no reason", reason = "", errors = [] }) {
    super(detail);
    this.name = "ServiceError";
    this.status = status;
    this.code = code;
    this.reason = reason;
    this.problems = errors;
  }
}

/** The service did not answer, or stopped in the middle of its reply. */
export class Unreachable extends Error {
  constructor(message = "The service does not answer.") {
    super(message);
    this.name = "Unreachable";
  }
}

/**
 * Tells the page about the key: `locked` when the service requires one or rejects this one, `unlocked` when there is
 * a new one.
 */
export const lock = new EventTarget();

let key = "";

/** @param {string} value the API key for all further requests; none if empty */
export function useKey(value) {
  key = value.trim();
  lock.dispatchEvent(new Event("unlocked"));
}

/** @returns {boolean} whether requests carry a key */
export function hasKey() {
  return key !== "";
}

/**
 * Send a request to the service; return its reply when it is no error.
 *
 * @param {string} path
 * @param {RequestInit & {accepted?: number[]}} options those of `fetch`; statuses in `accepted` are no errors
 * @returns {Promise<Response>}
 * @throws {ServiceError | Unreachable | DOMException} the last, an AbortError, if `signal` was aborted
 */
export async function send(path, { accepted = [], ...options } = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("x-api-key", key);
  const reply = await answered(fetch(path, { ...options, headers }));
  if (reply.ok || accepted.includes(reply.status)) return reply;
  const error = new ServiceError({ status: reply.status, ...(await problemOf(reply)) });
  if (reply.status === 401) lock.dispatchEvent(new Event("locked"));
  throw error;
}

/**
 * Send a request object as JSON; return the reply, parsed.
 *
 * @param {string} path
 * @param {unknown} body
 * @param {RequestInit} options
 * @returns {Promise<any>}
 * @throws {ServiceError | Unreachable | DOMException}
 */
export async function post(path, body, options = {}) {
  const headers = { "content-type": "application/json", accept: "application/json" };
  const reply = await send(path, { method: "POST", headers, body: JSON.stringify(body), ...options });
  return answered(reply.json());
}

/**
 * Wait for a part of the reply.
 *
 * @template T
 * @param {Promise<T>} part
 * @returns {Promise<T>}
 * @throws {Unreachable | DOMException}
 */
export async function answered(part) {
  try {
    return await part;
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Unreachable();
  }
}

/**
 * @param {Response} reply
 * @returns {Promise<object>}
 */
async function problemOf(reply) {
  try {
    const document = await reply.json();
    return typeof document === "object" && document !== null ? document : {};
  } catch {
    return {};
  }
}
