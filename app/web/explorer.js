/** The page `/`: a layer, its drawing, what one element sums, and what the service says about it. */

import "./key.js";
import "./figure.js";
import "./run.js";
import "./verify.js";
import { connected, entry, letterOf, nameOf, OPERATIONS, peers, reach, resolve, roles, sizeOn } from "./arithmetic.js";
import { isAway, rpc } from "./call.js";
import { hasKey, lock, ServiceError, send, Unreachable } from "./client.js";
import { curl, jsonRpc, numpyLine, pythonCall, pytorch } from "./code.js";
import { Fields } from "./fields.js";
import { request } from "./layer.js";
import { make } from "./make.js";
import { resolvedFacts } from "./resolved.js";
import { clamped, fragment, parse } from "./state.js";
import { decode, fill, numberOf, rounded, sum, terms, withData } from "./values.js";
import { axes, label, rows, sumText, told } from "./words.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Role} Role */

const STEPS = 4096;

/** @param {string} id @returns {HTMLElement} */
const at = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
/** @param {number} ms @returns {Promise<void>} */
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

const drawing = /** @type {import("./figure.js").LayerDrawing} */ (at("drawing"));
const run = /** @type {import("./run.js").RunLayer} */ (at("run"));
const verify = /** @type {import("./verify.js").VerifyResult} */ (at("verify"));
const numbers = /** @type {HTMLSelectElement} */ (at("values"));

let { state, note } = parse(location.hash);
let resolved = resolve(state.layer);
/** The element under the pointer, before it is kept. @type {Element | null} */
let pointed = null;
/** @type {import("./values.js").Values | null} */
let values = null;
/** The colours of what was computed or verified. @type {import("./figure.js").Colours | null} */
let colours = null;
let step = -1;
let playing = 0;
/** @type {Record<Role, number>} */
let planes = { src: 0, weights: 0, dst: 0 };
/** @type {"curl" | "python" | "pytorch" | "rpc"} */
let language = "curl";

const fields = new Fields(at("fields"), (layer) => {
  state.layer = layer;
  showLayer();
});

/** The element that is marked. */
const current = () => pointed ?? state.element;

/** Show a changed layer everywhere, and have it checked. */
function showLayer() {
  stop();
  pointed = null;
  step = -1;
  resolved = resolve(state.layer);
  state.element = joined(clamped(state.layer, state.element));
  values = fill(state.layer, resolved, state.values);
  fields.show(state.layer);
  numbers.value = state.values;
  at("legend").className = `legend dim beside-${resolved.transposed ? "src" : "dst"}`;
  at("hatched").textContent = resolved.transposed ? "output padding" : "not read by any tap";
  showViews();
  toPlanes();
  showAll();
  showCode();
  keepAddress();
  check();
  run.show(state.layer, resolved);
}

/** Channels in one group: that of the element's own channel. @param {Element} element @returns {Element} */
function joined(element) {
  if (connected(state.layer, element.i, element.o) || !resolved.fits) return element;
  const { src, dst } = peers(state.layer, { ...element, role: element.role === "src" ? "src" : "dst" });
  return element.role === "src" ? { ...element, o: dst.from } : { ...element, i: src.from };
}

/** Move the planes of three axes to where something takes part; return whether one moved. */
function toPlanes() {
  const element = current();
  if (element.at.length < 3) return false;
  const met = entry(reach(state.layer, resolved, element).real, 0);
  const before = JSON.stringify(planes);
  for (const role of roles(state.layer.op)) {
    const letter = letterOf(resolved, role);
    if (role === element.role) planes[role] = entry(element.at, 0);
    else if (met.length && !met.some((each) => each[letter] === planes[role])) planes[role] = entry(met, 0)[letter];
  }
  return before !== JSON.stringify(planes);
}

/** The products of the element that is kept. */
const products = () => [...terms(state.layer, resolved, current(), STEPS)];

function shown() {
  const term = step < 0 ? null : (products()[step] ?? null);
  // A product of other channels is shown on those channels.
  const element = term ? { ...current(), n: term.src.n, i: term.src.i, o: term.src.o } : current();
  if (term && term.src.at.length === 3)
    for (const role of roles(state.layer.op)) planes[role] = entry(term[role].at, 0);
  return { layer: state.layer, resolved, element, planes, values, term, colours };
}

function showAll() {
  drawing.show(shown());
  showElement();
}

function showElement() {
  const { layer } = state;
  const element = current();
  if (!resolved.fits) {
    for (const id of ["element", "told", "sum", "line", "text", "at"]) at(id).textContent = "";
    at("element").textContent = "No element: the sizes do not fit";
    return;
  }
  at("element").textContent = label(layer, element);
  at("told").textContent = told(layer, resolved, element);
  at("line").textContent = numpyLine(layer, resolved, element);
  showSum(element);
  if (/** @type {HTMLDetailsElement} */ (at("twin")).open) showTwin();
}

/** @param {Element} element */
function showSum(element) {
  const { layer } = state;
  const { inside, times } = reach(layer, resolved, element);
  const count = inside * times;
  at("at").textContent =
    step < 0
      ? ""
      : `product ${step + 1} of ${count.toLocaleString("en")}${count > STEPS ? `, of which ${STEPS} are shown` : ""}`;
  const isSum = element.role === OPERATIONS[layer.op].output;
  if (!values || !isSum) {
    at("sum").textContent = "";
    return;
  }
  const listed = [...terms(layer, resolved, element, step < 0 ? 13 : STEPS)];
  const { before, lit, after } = sumText(layer, resolved, values, listed, step, count);
  const total = sum(layer, resolved, values, element);
  const computed = numberOf(layer, resolved, values, element);
  const nearest = rounded(layer.dtype, total);
  const agrees = computed === nearest;
  const told = `the service computed ${computed}${agrees && nearest !== total ? `, the nearest ${layer.dtype} number` : ""}`;
  const verdict =
    computed === undefined
      ? ""
      : make("span", { class: agrees ? "good" : "bad" }, ` ${agrees ? "\u2713" : "\u2717"} ${told}`);
  at("sum").replaceChildren(
    before,
    ...(lit ? [make("mark", {}, lit)] : []),
    `${after || lit || before ? `${after} = ` : ""}${total}`,
    verdict,
  );
}

/** The drawing as text. */
function showTwin() {
  const element = current();
  const row = (/** @type {string} */ tag, /** @type {string[]} */ cells) =>
    make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  at("text").replaceChildren(
    ...axes(state.layer, resolved).map((sentence) => make("p", {}, sentence)),
    make("p", {}, told(state.layer, resolved, element)),
    make(
      "table",
      {},
      row("th", ["tensor", "positions that take part", "in padding"]),
      ...rows(state.layer, resolved, element).map((cells) => row("td", cells)),
    ),
  );
}

/** Sliders for the image, the channels and the planes that are drawn. */
function showViews() {
  const { layer, element } = state;
  const slider = (
    /** @type {string} */ text,
    /** @type {number} */ size,
    /** @type {number} */ value,
    /** @type {(value: number) => void} */ apply,
  ) => {
    const input = /** @type {HTMLInputElement} */ (
      make("input", { type: "range", min: "0", max: String(size - 1), value: String(value) })
    );
    const told = make("output", {}, String(value));
    input.addEventListener("input", () => {
      told.textContent = input.value;
      stop();
      step = -1;
      apply(Number(input.value));
    });
    return make("label", {}, text, input, told);
  };
  /** @type {Node[]} */
  const made = [];
  const view = (/** @type {"n" | "i" | "o"} */ name) => (/** @type {number} */ value) => {
    state.element = { ...state.element, [name]: value };
    if (resolved.bias && name !== "n") state.element = { ...state.element, i: value, o: value };
    const other = name === "i" ? "src" : "dst";
    const { role } = state.element;
    state.element = { ...joined({ ...state.element, role: other }), role };
    showAll();
    keepAddress();
    if (name !== "n" && layer.groups > 1) showViews();
  };
  if (!resolved.fits) return at("shown").replaceChildren();
  if (layer.n > 1) made.push(slider("image n", layer.n, element.n, view("n")));
  if (layer.i > 1) made.push(slider(resolved.bias ? "channel" : "channel i", layer.i, element.i, view("i")));
  if (layer.o > 1 && !resolved.bias) made.push(slider("channel o", layer.o, element.o, view("o")));
  if (layer.src.length === 3) {
    for (const role of roles(layer.op)) {
      const size = sizeOn(entry(resolved.axes, 0), role);
      made.push(
        slider(`plane of ${nameOf(layer.op, role)}`, size, planes[role], (value) => {
          planes[role] = value;
          if (role === state.element.role) state.element = { ...state.element, at: state.element.at.with(0, value) };
          showAll();
          keepAddress();
        }),
      );
    }
  }
  return at("shown").replaceChildren(...made);
}

/** Colour what was computed. @param {typeof colours} found */
function colour(found) {
  if (!colours && !found) return;
  colours = found;
  drawing.show(shown());
}

/** @param {Element} element */
function point(element) {
  if (playing) return;
  pointed = element;
  step = -1;
  drawing.mark(shown());
  showElement();
}

/** @param {Element} element */
function keep(element) {
  stop();
  pointed = null;
  step = -1;
  state.element = element;
  if (toPlanes()) {
    showViews();
    showAll();
  } else {
    drawing.mark(shown());
    showElement();
  }
  keepAddress();
}

function leave() {
  if (!pointed) return;
  pointed = null;
  drawing.mark(shown());
  showElement();
}

/** @param {number} by */
function stepBy(by) {
  const count = products().length;
  if (!count) return;
  const before = shown().element;
  step = (step + by + count + (step < 0 && by < 0 ? 1 : 0)) % count;
  const { element } = shown();
  if (element.n !== before.n || element.i !== before.i || element.o !== before.o || element.at.length === 3)
    drawing.show(shown());
  else drawing.mark(shown());
  showElement();
}

function play() {
  if (playing) return stop();
  pointed = null;
  at("play").textContent = "Stop";
  stepBy(1);
  playing = setInterval(() => stepBy(1), 600);
}

function stop() {
  clearInterval(playing);
  playing = 0;
  at("play").textContent = "Play";
}

let addressed = 0;

/** Keep the state in the address, soon: browsers limit how often it may change. */
function keepAddress() {
  clearTimeout(addressed);
  addressed = setTimeout(() => history.replaceState(null, "", fragment(state)), 200);
}

function showCode() {
  const { layer } = state;
  for (const button of document.querySelectorAll("[data-code]")) {
    button.setAttribute("aria-pressed", String(button.getAttribute("data-code") === language));
  }
  const written = {
    curl: () => curl(layer, location.origin, hasKey()),
    python: () => pythonCall(layer, location.origin),
    pytorch: () => pytorch(layer, resolved),
    rpc: () => jsonRpc(layer),
  };
  at("code").textContent = written[language]();
}

let asked = 0;
/** @type {AbortController | null} */
let asking = null;

/** Have the service check the layer, and compute it with the numbers shown. Only the last question is answered. */
async function check() {
  const mine = ++asked;
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  at("resolved").classList.add("old");
  await pause(120);
  while (mine === asked) {
    try {
      const { op, ...params } = request(state.layer);
      const result = await rpc("ops.validate", { op, ...params }, signal);
      if (mine !== asked) return;
      showResolved(result);
      const inputs = values;
      if (inputs) await compute(op, params.attributes, inputs, signal, () => mine === asked);
      return;
    } catch (error) {
      if (mine !== asked || (error instanceof DOMException && error.name === "AbortError")) return;
      if (!(error instanceof ServiceError || error instanceof Unreachable)) throw error;
      showFault(error);
      if (!isAway(error)) return;
      await pause(2000);
    }
  }
}

/**
 * @param {Layer["op"]} op @param {object} attributes @param {import("./values.js").Values} inputs @param {AbortSignal} signal @param {() => boolean} wanted
 */
async function compute(op, attributes, inputs, signal, wanted) {
  const result = await rpc(op, { attributes, inputs: withData(state.layer, resolved, inputs) }, signal);
  if (!wanted()) return;
  const role = OPERATIONS[op].output;
  const { dtype, data } = result.outputs[nameOf(op, role)];
  values = { ...inputs, [role]: decode(dtype, data) };
  showAll();
}

/** @param {any} result of `ops.validate` */
function showResolved(result) {
  showVerdict("Valid", []);
  at("resolved").replaceChildren(...resolvedFacts(result));
}

/** @param {ServiceError | Unreachable} error */
function showFault(error) {
  if (error instanceof Unreachable)
    return showVerdict("The service does not answer. Everything typed is kept, and it is asked again.", []);
  const { problems, message } = error;
  const text =
    problems.length > 1 ? `Invalid: ${problems.length} rules are broken` : problems.length ? "Invalid" : message;
  showVerdict(text, problems);
}

/** @param {string} text @param {import("./client.js").Problem[]} problems */
function showVerdict(text, problems) {
  const valid = text === "Valid";
  fields.mark(problems);
  at("verdict").className = valid ? "good" : "bad";
  at("verdict").textContent = text;
  at("problems").replaceChildren(...problems.map(({ msg }) => make("li", {}, msg)));
  at("resolved").classList.toggle("old", !valid);
}

/** Ask again and again whether the service is ready. */
async function watch() {
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

function readAddress() {
  ({ state, note } = parse(location.hash));
  at("note").hidden = !note;
  at("note").textContent = note;
  planes = { src: 0, weights: 0, dst: 0 };
  showLayer();
}

drawing.addEventListener("point", (event) => point(/** @type {CustomEvent<Element>} */ (event).detail));
drawing.addEventListener("keep", (event) => keep(/** @type {CustomEvent<Element>} */ (event).detail));
drawing.addEventListener("leave", leave);
drawing.addEventListener("key", (event) => {
  const { key, role, plane } = /** @type {CustomEvent<{key: string, role: Role, plane: number}>} */ (event).detail;
  if (key === " ") play();
  else if (key === "+") stepBy(1);
  else if (key === "-") stepBy(-1);
  else if (key === "Escape") {
    stop();
    step = -1;
    showAll();
  } else if (state.layer.src.length === 3 && key.startsWith("Page")) {
    const size = sizeOn(entry(resolved.axes, 0), role);
    const moved = Math.max(0, Math.min(size - 1, plane + (key === "PageUp" ? -1 : 1)));
    keep({
      ...state.element,
      role,
      at: (state.element.role === role ? state.element.at : state.element.at.map(() => 0)).with(0, moved),
    });
  }
});
for (const part of [run, verify]) {
  part.addEventListener("choose", (event) => {
    keep(clamped(state.layer, joined(/** @type {CustomEvent<Element>} */ (event).detail)));
    showViews();
    showAll();
  });
}
run.addEventListener("inputs", () => verify.show(run));
run.addEventListener("computed", () => {
  verify.take.disabled = !run.result;
  colour(run.result && { of: (element) => run.level(element), beneath: false });
});
verify.addEventListener("report", () =>
  colour(verify.report && { of: (element) => verify.level(element), beneath: true }),
);
// A file that misses its zone must not replace the page.
for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
at("play").addEventListener("click", play);
at("next").addEventListener("click", () => stepBy(1));
at("back").addEventListener("click", () => stepBy(-1));
at("twin").addEventListener("toggle", showTwin);
numbers.addEventListener("change", () => {
  state.values = numbers.value;
  showLayer();
});
for (const button of document.querySelectorAll("[data-code]")) {
  button.addEventListener("click", () => {
    language = /** @type {typeof language} */ (button.getAttribute("data-code"));
    showCode();
  });
}
// Browsers have the clipboard only for pages from this machine or over HTTPS.
at("copy").hidden = !navigator.clipboard;
at("copy").addEventListener("click", () => navigator.clipboard.writeText(at("code").textContent ?? ""));
lock.addEventListener("unlocked", () => {
  showCode();
  check();
});
addEventListener("hashchange", readAddress);
readAddress();
watch();
