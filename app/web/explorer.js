/** The page `/`: a layer, its drawing, what one element sums, and what the service says about it. */

import "./key.js";
import "./figure.js";
import "./groups.js";
import "./run.js";
import "./verify.js";
import {
  connected,
  entry,
  indexOf,
  letterOf,
  nameOf,
  OPERATIONS,
  peers,
  reach,
  resolve,
  roles,
  sizeOn,
} from "./arithmetic.js";
import { hasKey, lock } from "./client.js";
import { numpyLine } from "./code.js";
import { Fields } from "./fields.js";
import { DATA, inputsOf, SEEDED, typedIn, typedName } from "./generate.js";
import { make } from "./make.js";
import { readNumbers } from "./npy.js";
import { pythonCall, pytorch } from "./python.js";
import { callOf, curl, jsonRpc } from "./shell.js";
import { clamped, fragment, parse } from "./state.js";
import { agrees, fill, isSmall, numberOf, rounded, shortest, sum, terms } from "./values.js";
import { Verdict, watch } from "./verdict.js";
import { Views } from "./views.js";
import { axes, label, rows, sumText, told } from "./words.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Role} Role */

const STEPS = 4096;

/** @param {string} id @returns {HTMLElement} */
const at = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
/** @param {number} ms @returns {Promise<void>} */

const drawing = /** @type {import("./figure.js").LayerDrawing} */ (at("drawing"));
const groups = /** @type {import("./groups.js").ChannelGroups} */ (at("groups"));
const run = /** @type {import("./run.js").RunLayer} */ (at("run"));
const verify = /** @type {import("./verify.js").VerifyResult} */ (at("verify"));
const numbers = /** @type {HTMLSelectElement} */ (at("values"));
const seed = /** @type {HTMLInputElement} */ (at("seed"));
const views = new Views(at("shown"));
numbers.replaceChildren(...Object.entries(DATA).map(([value, text]) => make("option", { value }, text)));

let { state, note } = parse(location.hash);
let resolved = resolve(state.layer);
/** The element under the pointer, before it is kept. @type {Element | null} */
let pointed = null;
/** @typedef {import("./values.js").Values | null} Numbers */
/** The numbers of the inputs, where there are few enough; and of all tensors, where they are drawn. */
let [inputs, values] = /** @type {[Numbers, Numbers]} */ ([null, null]);
/** The numbers of the inputs that are files, or null for files that don't fit the layer. @type {Map<Role, Float32Array<ArrayBuffer> | null>} */
let read = new Map();
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

const verdict = new Verdict(fields, (computed) => {
  values = computed;
  showAll();
});

/** The element that is marked. */
const current = () => pointed ?? state.element;

/** Show a changed layer everywhere, and have it checked. */
function showLayer() {
  stop();
  pointed = null;
  step = -1;
  resolved = resolve(state.layer);
  inputs = values = null;
  state.element = joined(clamped(state.layer, state.element));
  fields.show(state.layer);
  at("legend").className = `legend dim beside-${resolved.transposed ? "src" : "dst"}`;
  at("hatched").textContent = resolved.transposed ? "output padding" : "not read by any tap";
  toPlanes();
  run.show(state.layer, resolved, state.given);
  readFiles();
}

/** Show the numbers of the inputs everywhere, and have the result computed. */
function showNumbers() {
  const { layer, given } = state;
  numbers.value = given.kind;
  if (document.activeElement !== seed) seed.value = String(given.seed);
  at("seeded").hidden = !SEEDED.includes(given.kind);
  inputs = numbersGiven();
  values = given.kind === "none" ? null : inputs;
  showViews();
  showAll();
  showCode();
  keepAddress();
  verdict.ask(layer, resolved, values);
  run.show(layer, resolved, given);
}

/** The numbers of the inputs, where there are few enough and files fit. */
function numbersGiven() {
  const { layer, given } = state;
  if (!isSmall(resolved) || [...read.values()].includes(null)) return null;
  return { ...fill(layer, resolved, given), .../** @type {import("./values.js").Values} */ (Object.fromEntries(read)) };
}

let reading = 0;

/** Read the files of the run, whose numbers are then those of the drawing. */
async function readFiles() {
  const mine = ++reading;
  const { files } = run;
  const { layer } = state;
  const shapes = resolved.shapes;
  const found = await Promise.all(
    inputsOf(layer.op).flatMap((role) => {
      const chosen = files.get(nameOf(layer.op, role));
      if (!chosen) return [];
      const drawn = isSmall(resolved) ? readNumbers(chosen.file, chosen.header, layer.dtype, shapes[role]) : null;
      return [(async () => /** @type {const} */ ([role, await drawn]))()];
    }),
  );
  if (mine !== reading) return;
  read = new Map(found);
  showNumbers();
}

/** What was typed into the element that is kept, or null for the generated number. @param {number | null} number */
function type(number) {
  const name = typedName(state.element.role, indexOf(state.layer, state.element));
  const { [name]: _, ...typed } = state.given.typed;
  state.given = { ...state.given, typed: number === null ? typed : { ...typed, [name]: number } };
  step = -1;
  showNumbers();
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
  const typed = inputsOf(state.layer.op).filter((role) => !read.has(role));
  return { layer: state.layer, resolved, element, planes, values, term, colours, typed };
}

function showAll() {
  drawing.show(shown());
  groups.show(state.layer, resolved, shown().element);
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
  const right = computed !== undefined && agrees(layer, resolved, values, element, computed);
  const how =
    computed === total ? "" : computed === nearest ? `, the nearest ${layer.dtype} number` : ", rounded on the way";
  const told = `the service computed ${shortest(layer.dtype, computed ?? 0)}${right ? how : ""}`;
  const verdict =
    computed === undefined
      ? ""
      : make("span", { class: right ? "good" : "bad" }, ` ${right ? "\u2713" : "\u2717"} ${told}`);
  at("sum").replaceChildren(
    before,
    ...(lit ? [make("mark", {}, lit)] : []),
    `${after || lit || before ? `${after} = ` : ""}${Number(total.toPrecision(9))}`,
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
  /** @type {import("./views.js").View[]} */
  const made = [];
  const add = (
    /** @type {string} */ text,
    /** @type {number} */ size,
    /** @type {number} */ value,
    /** @type {(value: number) => void} */ apply,
  ) =>
    made.push({
      text,
      size,
      value,
      apply: (chosen) => {
        stop();
        step = -1;
        apply(chosen);
        showViews();
        showAll();
        keepAddress();
      },
    });
  const view = (/** @type {"n" | "i" | "o"} */ name) => (/** @type {number} */ value) => {
    state.element = { ...state.element, [name]: value };
    if (resolved.bias && name !== "n") state.element = { ...state.element, i: value, o: value };
    const { role } = state.element;
    state.element = { ...joined({ ...state.element, role: name === "i" ? "src" : "dst" }), role };
  };
  if (!resolved.fits) return views.show([]);
  if (layer.n > 1) add("image n", layer.n, element.n, view("n"));
  if (layer.i > 1) add(resolved.bias ? "channel" : "channel i", layer.i, element.i, view("i"));
  if (layer.o > 1 && !resolved.bias) add("channel o", layer.o, element.o, view("o"));
  if (layer.src.length === 3) {
    for (const role of roles(layer.op)) {
      const size = sizeOn(entry(resolved.axes, 0), role);
      add(`plane of ${nameOf(layer.op, role)}`, size, planes[role], (value) => {
        planes[role] = value;
        if (role === state.element.role) state.element = { ...state.element, at: state.element.at.with(0, value) };
      });
    }
  }
  return views.show(made);
}

/** Colour what was computed. @param {typeof colours} found */
function colour(found) {
  if (!colours && !found) return;
  colours = found;
  drawing.show(shown());
}

/** Fill the inputs in another way. @param {Partial<import("./generate.js").Given>} given */
function give(given) {
  state.given = { ...state.given, ...given };
  step = -1;
  showNumbers();
}

/** @param {Element} element */
function point(element) {
  if (playing || drawing.field.isOpen) return;
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

/** How many numbers were typed, and whether the address has them. @param {boolean} whole */
function showTyped(whole) {
  const { layer, given } = state;
  const generated = inputsOf(layer.op).filter((role) => !read.has(role));
  const typed = generated.reduce((all, role) => all + typedIn(resolved, role, given.typed).size, 0);
  at("untype").hidden = !typed;
  const text = typed ? `${typed} typed${whole ? "" : ": too many for the address, a link will not have them"}` : "";
  if (at("typed").textContent !== text) at("typed").textContent = text;
}

let addressed = 0;

/** Keep the state in the address, soon: browsers limit how often it may change. */
function keepAddress() {
  clearTimeout(addressed);
  const { text, whole } = fragment(state);
  showTyped(whole);
  addressed = setTimeout(() => history.replaceState(null, "", text), 200);
}

function showCode() {
  const { layer } = state;
  for (const button of document.querySelectorAll("[data-code]")) {
    button.setAttribute("aria-pressed", String(button.getAttribute("data-code") === language));
  }
  const numbers =
    inputs && Object.fromEntries(inputsOf(layer.op).map((role) => [nameOf(layer.op, role), inputs?.[role]]));
  const files = new Map([...run.files].map(([name, { file }]) => [name, file.name]));
  const how = { options: run.options, origin: location.origin, keyed: hasKey() };
  const call = callOf(run.request, /** @type {Record<string, Float32Array> | null} */ (numbers), files, how);
  const written = { curl, python: pythonCall, pytorch, rpc: jsonRpc };
  at("code").textContent = written[language](call, layer, resolved);
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
drawing.addEventListener("type", (event) => type(/** @type {CustomEvent<number | null>} */ (event).detail));
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
run.addEventListener("inputs", () => {
  verify.show(run);
  if (run.layer) readFiles();
});
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
numbers.addEventListener("change", () => give({ kind: numbers.value, typed: {} }));
seed.addEventListener("input", () => give({ seed: Math.min(999999, Number(seed.value.replace(/\D/g, ""))) }));
at("untype").addEventListener("click", () => {
  numbers.focus();
  give({ typed: {} });
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
lock.addEventListener("unlocked", showNumbers);
// The fragment is the layer's: a jump within the page must not change it.
document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault();
  at("figure").focus();
});
addEventListener("hashchange", readAddress);
readAddress();
watch();
