/** `<verify-result>`: compare a result with the float64 reference, and see where it is wrong. */

import { nameOf, OPERATIONS, product } from "./arithmetic.js";
import { isAway, sendTensors } from "./call.js";
import { ServiceError } from "./client.js";
import { MEDIA_TYPE, resultOf } from "./events.js";
import { make } from "./make.js";
import "./heat.js";
import { Job, pause } from "./job.js";
import { elementOf, joinPlanes, starts, views } from "./maps.js";
import * as words from "./report.js";
import "./source.js";
import { npy } from "./tensor.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./report.js").Report} Report */
/** @typedef {import("./source.js").TensorSource} TensorSource */
/** A map of errors as shares of what is allowed, by some axes. @typedef {{view: import("./maps.js").View, cells: number[], shares: number[], starts: number[][]}} ErrorMap */

/** Most circles in a map, and most products of the worst element. */
const [CIRCLES, TERMS] = [24, 6];

/** Tells its page with a `choose` event which element was chosen, and with `report` that there is a report, or none any more. */
export class VerifyResult extends HTMLElement {
  constructor() {
    super();
    /** @type {import("./run.js").RunLayer | null} */
    this.run = null;
    /** @type {Report | null} */
    this.report = null;
    /** @type {ErrorMap[]} */
    this.maps = [];
    this.asked = 0;
    this.from = make("div", { class: "sources" });
    /** @type {TensorSource | null} */
    this.source = null;
    this.take = /** @type {HTMLButtonElement} */ (make("button", { type: "button" }, "Take the run's result"));
    this.explain = /** @type {HTMLInputElement} */ (make("input", { type: "checkbox" }));
    this.job = new Job("Verify", (signal) => this.verify(signal));
    this.found = make("div", { class: "report" });
  }

  connectedCallback() {
    this.replaceChildren(
      make("h2", {}, "Verify"),
      make(
        "p",
        { class: "dim" },
        "Is your result right? It is compared with the float64 reference on the inputs above.",
      ),
      this.from,
      make(
        "div",
        { class: "show" },
        this.take,
        make("label", {}, this.explain, " test every hypothesis, also if it passes"),
      ),
      ...this.job.parts,
      this.found,
    );
    this.take.addEventListener("click", () => {
      const result = this.run?.result;
      if (result) this.source?.take(new File([npy(result)], `${result.name}.npy`));
    });
  }

  /** @returns {Layer} */
  get layer() {
    return /** @type {Layer} */ (this.run?.layer);
  }

  /** Verify on the layer and the inputs of a run. @param {import("./run.js").RunLayer} run */
  show(run) {
    this.run = run;
    const { output } = OPERATIONS[this.layer.op];
    const name = nameOf(this.layer.op, output);
    if (this.source?.name !== name) {
      const { chosen } = this.source ?? {};
      this.source = /** @type {TensorSource} */ (document.createElement("tensor-source")).setUp(name, output);
      this.source.addEventListener("change", () => {
        this.forget();
        this.ask();
      });
      this.from.replaceChildren(this.source);
      if (chosen) this.source.take(chosen.file);
    }
    const shape = run.resolved?.shapes[output] ?? [];
    this.source.expect(`${this.layer.dtype} [${shape.join(", ")}]`, "no file yet: drop yours here");
    this.take.disabled = !run.result;
    this.forget();
    this.ask();
  }

  /** Stop what runs, and drop its report. */
  forget() {
    this.job.reset();
    this.drop();
  }

  /** Drop the report. */
  drop() {
    this.report = null;
    this.maps = [];
    this.found.replaceChildren();
    this.dispatchEvent(new CustomEvent("report"));
  }

  /** Check the file, soon. */
  async ask() {
    const mine = ++this.asked;
    this.source?.refuse("");
    if (!this.source?.chosen) return;
    await pause(150);
    while (mine === this.asked) {
      try {
        await this.validate(new AbortController().signal);
        return;
      } catch (error) {
        if (!(error instanceof ServiceError) && !isAway(error)) throw error;
        if (!isAway(error)) return;
        await pause(2000);
      }
    }
  }

  /** Have the service check the inputs, and compare the file with the output that it names. @param {AbortSignal} signal */
  async validate(signal) {
    const { run, source } = this;
    if (!run || !source) return;
    const { name = "", chosen } = source;
    if (source.fault || !chosen)
      throw new ServiceError({ detail: `send exactly one result to verify, as the input ${name}` });
    const { outputs } = await run.validate(signal);
    const refusal = misfit(name, chosen.header, outputs[name]);
    source.refuse(refusal);
    if (refusal) throw new ServiceError({ detail: refusal });
  }

  /** @param {AbortSignal} signal */
  async verify(signal) {
    const { job, run, source } = this;
    this.drop();
    job.say("Checking");
    await this.validate(signal);
    if (!run || !source?.chosen) return;
    const { name = "", chosen } = source;
    const tensors = await run.tensors(signal, job);
    tensors.set(name, chosen.file);
    const asked = run.request;
    asked.inputs[name] = { dtype: chosen.header.dtype, shape: chosen.header.shape };
    const options = this.explain.checked ? { explain: true } : {};
    const reply = await sendTensors(asked, tensors, { path: "/verify", accept: MEDIA_TYPE, options, signal });
    job.say("Computing the reference");
    const report = await resultOf(reply, (done, total) => job.progress(done / Math.max(1, total), ""));
    signal.throwIfAborted();
    job.progress(1, "");
    this.tell(report);
    job.say(report.passed ? "It passed." : "It failed.", report.passed ? "good" : "bad");
  }

  /** Show a report. @param {Report} report */
  tell(report) {
    this.report = report;
    const first = report.projections?.checked.first ?? report.shape.map(() => 0);
    const whole = report.projections?.checked.shape ?? report.shape;
    this.maps = views(this.layer).flatMap((view) => {
      const given = report.maps[view.name];
      if (!given) return [];
      const values = [given.values]
        .flat(3)
        .map(words.number)
        .map((share) => (Number.isNaN(share) ? Infinity : share));
      const sizes = view.axes.map((axis) => whole[axis] ?? 1);
      const { cells, largest } = joinPlanes(
        sizes.map((size) => Math.min(64, size)),
        values,
      );
      const from = cells.map((count, at) =>
        starts(sizes[at] ?? 1, count).map((start) => start + (first[view.axes[at] ?? 0] ?? 0)),
      );
      return [{ view, cells, shares: largest, starts: from }];
    });
    const shown = this.maps.filter(({ cells }, index) => index === 0 || product(cells) > 1);
    const maps = shown.map((map) => this.drawn(map));
    const worst = words.worstText(report);
    const list = (/** @type {string} */ title, /** @type {string[]} */ items) =>
      items.length ? [make("h3", {}, title), make("ul", {}, ...items.map((item) => make("li", {}, item)))] : [];
    this.found.replaceChildren(
      make(
        "p",
        { class: `verdict ${report.passed ? "good" : "bad"}` },
        `${report.passed ? "\u2713" : "\u2717"} ${words.verdict(report)}`,
      ),
      ...words.projected(report).map((line) => make("p", {}, line)),
      make(
        "ul",
        { class: "rules" },
        ...words
          .judged(report)
          .map((rule) =>
            make(
              "li",
              { class: rule.passed ? "" : "broken" },
              make(
                "strong",
                { class: rule.passed ? "good" : "bad" },
                `${rule.passed ? "\u2713" : "\u2717"} ${rule.rule.replace("_", " ")}`,
              ),
              `: ${words.found(rule)}`,
              make("span", { class: "dim" }, `. Rule: ${rule.text}.`),
            ),
          ),
      ),
      ...(report.where ? [make("p", {}, make("strong", {}, "Where: "), `${report.where.text}.`)] : []),
      ...list("What may have gone wrong", [...report.causes.map(({ text }) => text), ...report.hints]),
      make("div", { class: "maps" }, ...maps),
      make(
        "p",
        { class: "legend dim" },
        make("span", { class: "scale share", "aria-hidden": "true" }),
        "1/1000 of the allowed error to 1000 times it, the middle just allowed; wrong cells have a circle",
      ),
      this.twin(shown),
      ...(worst ? [make("p", {}, worst, " ", this.shower())] : []),
      ...list(
        `It sums ${report.worst?.terms.toLocaleString("en")} products, the largest`,
        words.worstTerms(report, TERMS),
      ),
      make("p", { class: "dim" }, words.detection(report)),
    );
    for (const map of this.found.querySelectorAll("heat-map")) /** @type {import("./heat.js").HeatMap} */ (map).draw();
    this.dispatchEvent(new CustomEvent("report", { detail: report }));
    if (!report.passed) this.chooseWorst();
  }

  /** A button that shows the worst element in the drawing. */
  shower() {
    const button = make("button", { type: "button" }, "Show it in the drawing");
    button.addEventListener("click", () => {
      this.chooseWorst();
      document.querySelector("layer-drawing")?.scrollIntoView({ block: "center" });
    });
    return button;
  }

  chooseWorst() {
    const index = this.report?.worst?.index;
    if (index) this.choose(index);
  }

  /** @param {number[]} index of the result */
  choose(index) {
    const role = OPERATIONS[this.layer.op].output;
    const element = elementOf(this.layer, role, index, { role, n: 0, i: 0, o: 0, at: [] });
    this.dispatchEvent(new CustomEvent("choose", { detail: element }));
  }

  /** @param {ErrorMap} map */
  drawn(map) {
    const { view, cells, shares } = map;
    const circles = shares.filter((share) => share > 1).length <= CIRCLES;
    const element = /** @type {import("./heat.js").HeatMap} */ (document.createElement("heat-map"));
    element.heat = {
      name: `Largest error by ${view.name}`,
      cells,
      words: view.words,
      ends: cells.map((_, at) => [map.starts[at]?.[0] ?? 0, (map.starts[at]?.at(-1) ?? 1) - 1]),
      look: (cell) => ({
        level: `level ${words.shareLevel(shares[cell] ?? 0)}`,
        marked: circles && (shares[cell] ?? 0) > 1,
      }),
      told: (cell) => told(map, cell),
    };
    element.addEventListener("choose", (event) => {
      const at = places(map, /** @type {CustomEvent<number>} */ (event).detail);
      const index = [...(this.report?.worst?.index ?? this.report?.shape.map(() => 0) ?? [])];
      view.axes.forEach((axis, on) => {
        const [from = 0, to = 0] = at[on] ?? [];
        const kept = index[axis] ?? 0;
        if (kept < from || kept > to) index[axis] = from;
      });
      this.choose(index);
    });
    return element;
  }

  /** The maps as text. @param {ErrorMap[]} maps */
  twin(maps) {
    const lines = maps.flatMap((map) => {
      const order = [...map.shares.keys()].sort((one, other) => (map.shares[other] ?? 0) - (map.shares[one] ?? 0));
      return [
        make("p", {}, `Largest errors by ${map.view.name}, as shares of what is allowed:`),
        make("ul", {}, ...order.slice(0, 12).map((cell) => make("li", {}, told(map, cell)))),
      ];
    });
    return make("details", {}, make("summary", {}, "The maps as text"), ...lines);
  }

  /** The class of the colour of an element of the result, by its tap or pixel. @param {Element} element @returns {string} */
  level(element) {
    const [map] = this.maps;
    if (!map) return "";
    const bias = OPERATIONS[this.layer.op].bias && OPERATIONS[this.layer.op].output === "weights";
    const at = bias ? [element.o] : element.at;
    const cell = map.cells.reduce((all, count, axis) => {
      const from = map.starts[axis] ?? [];
      const mine = from.findIndex(
        (start, index) => start <= (at[axis] ?? 0) && (at[axis] ?? 0) < (from[index + 1] ?? 0),
      );
      return mine < 0 ? Number.NaN : all * count + mine;
    }, 0);
    return Number.isNaN(cell) ? "" : words.shareLevel(map.shares[cell] ?? 0);
  }
}

/**
 * What the service says about a result of another dtype or shape than the output's; nothing if it fits.
 * @param {string} name @param {{dtype: string, shape: number[]}} given @param {{dtype: string, shape: number[]}} output @returns {string}
 */
function misfit(name, given, output) {
  const dims = (/** @type {number[]} */ shape) => `(${shape.join(", ")})`;
  const problems = [];
  if (given.dtype !== output.dtype)
    problems.push(
      `${name} must be ${output.dtype} like the inputs, but is ${given.dtype}: to verify a result of ${given.dtype}, convert the inputs to ${given.dtype}`,
    );
  if (String(given.shape) !== String(output.shape))
    problems.push(`${name} must have shape ${dims(output.shape)}, but has ${dims(given.shape)}`);
  return problems.join("; ");
}

/** The first and the last position of a cell on each axis. @param {ErrorMap} map @param {number} cell @returns {[number, number][]} */
function places({ cells, starts: from }, cell) {
  let left = cell;
  /** @type {[number, number][]} */
  const found = [];
  for (let axis = cells.length - 1; axis >= 0; axis--) {
    const at = left % (cells[axis] ?? 1);
    left = Math.floor(left / (cells[axis] ?? 1));
    found[axis] = [from[axis]?.[at] ?? 0, (from[axis]?.[at + 1] ?? 1) - 1];
  }
  return found;
}

/** @param {ErrorMap} map @param {number} cell @returns {string} */
function told(map, cell) {
  const at = places(map, cell).map(
    ([from, to], axis) => `${map.view.words[axis]} ${from === to ? from : `${from} to ${to}`}`,
  );
  return `${at.join(", ")}: ${words.short(map.shares[cell] ?? 0)}`;
}

customElements.define("verify-result", VerifyResult);
