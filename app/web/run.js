/** `<run-layer>`: compute a layer on files or generated numbers, and watch its result arrive. */

import { indexOf, nameOf, OPERATIONS, offsetOf, product } from "./arithmetic.js";
import { failure, isAway, requestWith, rpc, sendTensors } from "./call.js";
import { ServiceError, Unreachable } from "./client.js";
import { frames, MEDIA_TYPE } from "./frames.js";
import { DATA, inputsOf, npyOf, typedIn } from "./generate.js";
import { make } from "./make.js";
import "./heat.js";
import { Job, pause } from "./job.js";
import { elementOf, Filling, unravel, views } from "./maps.js";
import { BYTES, widen } from "./npy.js";
import "./source.js";
import { checksum, download, npy, place } from "./tensor.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Resolved} Resolved */
/** @typedef {import("./source.js").TensorSource} TensorSource */
/** @typedef {import("./heat.js").HeatMap} HeatMap */
/** @typedef {import("./tensor.js").Tensor} Tensor */

const LEVELS = 8;
/** How convolutions and their gradients may be summed, as `options.algorithm` names it. */
const ALGORITHMS = { direct: "direct", winograd: "Winograd's", auto: "the faster of both" };
/** Milliseconds between two pictures of a running call. */
const PICTURE = 100;

/** @param {number} value */
const short = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "Inf or NaN");

/** @param {number} bytes */
const size = (bytes) => (bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

/** Tells its page with a `choose` event which element was chosen, and with `computed` that there is a result, or none any more. */
export class RunLayer extends HTMLElement {
  constructor() {
    super();
    /** @type {Layer | null} */
    this.layer = null;
    /** @type {Resolved | null} */
    this.resolved = null;
    /** @type {import("./generate.js").Given} */
    this.given = { kind: "counting", seed: 1, typed: {} };
    /** @type {Map<string, TensorSource>} */
    this.sources = new Map();
    /** @type {Filling[]} */
    this.fillings = [];
    /** @type {Tensor | null} */
    this.result = null;
    /** Its numbers, once they were asked for. @type {Float32Array | null} */
    this.numbers = null;
    this.most = 0;
    this.shown = "";
    this.asked = 0;
    this.inputs = make("div", { class: "sources" });
    this.algorithm = /** @type {HTMLSelectElement} */ (
      make(
        "select",
        { "aria-describedby": "wrong-algorithm" },
        ...Object.entries(ALGORITHMS).map(([value, text]) => make("option", { value }, text)),
      )
    );
    this.choice = make("label", {}, "Algorithm: ", this.algorithm);
    this.wrong = make("p", { class: "wrong", id: "wrong-algorithm", role: "status" });
    this.job = new Job("Run", (signal) => this.compute(signal));
    this.maps = make("div", { class: "maps" });
    this.facts = make("dl", { class: "facts" });
    this.save = make("button", { type: "button" });
    this.text = make("div");
    this.twin = /** @type {HTMLDetailsElement} */ (
      make("details", {}, make("summary", {}, "The maps as text"), this.text)
    );
  }

  connectedCallback() {
    this.save.hidden = this.twin.hidden = true;
    const legend = make("p", { class: "legend dim" }, make("span", { class: "scale size", "aria-hidden": "true" }));
    this.legend = make("span");
    legend.append(this.legend);
    this.legends = legend;
    legend.hidden = true;
    this.replaceChildren(
      make("h2", {}, "Run"),
      this.inputs,
      make("div", { class: "show" }, this.choice),
      this.wrong,
      ...this.job.parts,
      this.maps,
      legend,
      this.twin,
      this.facts,
      this.save,
    );
    // Several files at once go to the inputs of their names.
    this.addEventListener("drop", (event) => {
      for (const file of event.dataTransfer?.files ?? []) this.sources.get(file.name.replace(/\.npy$/, ""))?.take(file);
    });
    this.algorithm.addEventListener("change", () => {
      this.forget();
      this.ask();
      this.dispatchEvent(new CustomEvent("inputs"));
    });
    this.twin.addEventListener("toggle", () => this.showText());
    this.save.addEventListener("click", () => this.result && download(this.result.name, npy(this.result)));
  }

  /** The files that are chosen. */
  get files() {
    return new Map(
      [...this.sources].flatMap(([name, { chosen }]) => (chosen ? [/** @type {const} */ ([name, chosen])] : [])),
    );
  }

  /** The request object, with what the files are. */
  get request() {
    const files = new Map([...this.files].map(([name, { header }]) => [name, header]));
    return requestWith(/** @type {Layer} */ (this.layer), files);
  }

  /** The options of the call. */
  get options() {
    return this.choice.hidden || this.algorithm.value === "direct" ? {} : { algorithm: this.algorithm.value };
  }

  /** Show a layer and its numbers; what was computed for others goes. @param {Layer} layer @param {Resolved} resolved @param {import("./generate.js").Given} given */
  show(layer, resolved, given) {
    const now = JSON.stringify([layer, given]);
    if (now === this.shown) return;
    this.shown = now;
    [this.layer, this.resolved, this.given] = [layer, resolved, given];
    this.choice.hidden = Boolean(resolved.bias);
    const names = inputsOf(layer.op).map((role) => nameOf(layer.op, role));
    if (String([...this.sources.keys()]) !== String(names)) this.build();
    this.change();
    this.ask();
  }

  /** The sources of the operation's inputs; files stay with their names. */
  build() {
    const layer = /** @type {Layer} */ (this.layer);
    const before = this.sources;
    this.sources = new Map(
      inputsOf(layer.op).map((role) => {
        const name = nameOf(layer.op, role);
        const old = before.get(name);
        if (old) return [name, old];
        const source = /** @type {TensorSource} */ (document.createElement("tensor-source")).setUp(name, role, "Save");
        source.addEventListener("change", () => {
          this.change();
          this.ask();
        });
        source.addEventListener("save", () => this.saveInput(role));
        return [name, source];
      }),
    );
    this.inputs.replaceChildren(...this.sources.values());
  }

  /** Show that there are other inputs: what was computed from the last ones goes. */
  change() {
    this.showSources();
    this.forget();
    this.dispatchEvent(new CustomEvent("inputs"));
  }

  /** Save a generated input, if the service takes it. @param {import("./arithmetic.js").Role} role */
  async saveInput(role) {
    const { signal } = new AbortController();
    try {
      await this.validate(signal);
      download(nameOf(/** @type {Layer} */ (this.layer).op, role), await this.generate(role, signal));
    } catch (error) {
      if (!(error instanceof ServiceError || error instanceof Unreachable)) throw error;
      this.job.say(error.message, "bad");
    }
  }

  showSources() {
    const { layer, resolved } = this;
    if (!layer || !resolved) return;
    const { kind, typed } = this.given;
    for (const role of inputsOf(layer.op)) {
      const { size: count } = typedIn(resolved, role, typed);
      const filled = DATA[/** @type {keyof typeof DATA} */ (kind === "none" ? "counting" : kind)];
      this.sources
        .get(nameOf(layer.op, role))
        ?.expect(
          `${layer.dtype} [${resolved.shapes[role].join(", ")}]`,
          `as drawn: ${filled}${count ? `, ${count} typed` : ""}`,
        );
    }
  }

  /** Stop what runs, and drop its result. */
  forget() {
    this.job.reset();
    this.drop();
    this.fillings = [];
    this.maps.replaceChildren();
    this.twin.hidden = true;
    if (this.legends) this.legends.hidden = true;
  }

  /** Drop the result. */
  drop() {
    this.result = this.numbers = null;
    this.save.hidden = true;
    this.facts.replaceChildren();
    this.dispatchEvent(new CustomEvent("computed"));
  }

  /** Have the service check files and options, soon: the layer itself is checked beside its fields. */
  async ask() {
    const mine = ++this.asked;
    this.refuse([]);
    if (!this.files.size && !this.options.algorithm) return;
    await pause(120);
    while (mine === this.asked) {
      try {
        await this.validate(new AbortController().signal, this.options);
        return;
      } catch (error) {
        if (error instanceof ServiceError && !isAway(error)) return;
        if (!isAway(error)) throw error;
        await pause(2000);
      }
    }
  }

  /** Have the service check the call before any data are sent; what it says about a file is shown beside it. @param {AbortSignal} signal @param {object} [options] */
  async validate(signal, options = {}) {
    const { op, ...params } = this.request;
    for (const [name, source] of this.sources)
      if (source.fault) throw new ServiceError({ detail: `${name} has no tensor` });
    try {
      const reply = await rpc("ops.validate", { op, ...params, options }, signal);
      this.refuse([]);
      return reply;
    } catch (error) {
      if (error instanceof ServiceError)
        this.refuse(error.problems.length ? error.problems : [{ loc: [], msg: error.message }]);
      throw error;
    }
  }

  /**
   * Show broken rules beside the files or the option that they are about, and those about anything else beside the first file.
   * @param {Pick<import("./client.js").Problem, "loc" | "msg">[]} found
   */
  refuse(found) {
    const [first] = this.files.keys();
    const isOption = (/** @type {{loc: (string | number)[]}} */ { loc }) => loc[0] === "options";
    this.wrong.textContent = found
      .filter(isOption)
      .map(({ msg }) => msg)
      .join("; ");
    for (const [name, { chosen }] of this.sources) {
      const mine = found.filter((problem) => {
        if (isOption(problem)) return false;
        const [member, input] = problem.loc;
        const about = member === "inputs" && this.files.has(String(input)) ? input : first;
        return chosen && about === name;
      });
      this.sources.get(name)?.refuse(mine.map(({ msg }) => msg).join("; "));
    }
  }

  /** @param {import("./arithmetic.js").Role} role @param {AbortSignal} signal */
  generate(role, signal) {
    const [layer, resolved] = [/** @type {Layer} */ (this.layer), /** @type {Resolved} */ (this.resolved)];
    return npyOf(layer, resolved, role, this.given, signal);
  }

  /** The inputs as `.npy` files. @param {AbortSignal} signal @param {Job} job @returns {Promise<Map<string, Blob>>} */
  async tensors(signal, job) {
    const { op } = /** @type {Layer} */ (this.layer);
    const { files } = this;
    const found = new Map();
    for (const role of inputsOf(op)) {
      const name = nameOf(op, role);
      if (!files.has(name)) job.say(`Making ${name}`);
      found.set(name, files.get(name)?.file ?? (await this.generate(role, signal)));
    }
    const bytes = [...found.values()].reduce((all, { size: one }) => all + one, 0);
    job.say(`Sending ${size(bytes)}`);
    return found;
  }

  /** @param {AbortSignal} signal */
  async compute(signal) {
    const { job } = this;
    this.drop();
    job.say("Checking");
    const { options } = this;
    await this.validate(signal, options);
    const tensors = await this.tensors(signal, job);
    const started = performance.now();
    const reply = await sendTensors(this.request, tensors, { accept: MEDIA_TYPE, options, signal });
    await this.receive(reply, started, signal);
  }

  /** @param {Response} reply @param {number} started @param {AbortSignal} signal */
  async receive(reply, started, signal) {
    const { job } = this;
    /** @type {Tensor | null} */
    let result = null;
    let [tiles, all, share, rested] = [0, 1, 0, performance.now()];
    let changed = false;
    const paint = () => {
      if (!changed) return;
      changed = false;
      job.progress(share, `${tiles} of ${all} tiles`);
      this.paint();
    };
    const painter = setInterval(paint, PICTURE);
    try {
      for await (const { header: head, body } of frames(reply)) {
        changed = true;
        signal.throwIfAborted();
        if (head.type === "error") throw failure(head);
        if (head.type === "begin") {
          const { output, dtype, shape } = head;
          result = { name: output, dtype, shape, bytes: new Uint8Array(product(shape) * (BYTES[dtype] ?? 4)) };
          all = head.tiles;
          this.begin(shape);
          job.say(`Computing ${all === 1 ? "1 tile" : `${all} tiles`}`);
        } else if (head.type === "progress") share = head.done / Math.max(1, head.total);
        else if (head.type === "tile" && result) {
          tiles++;
          place(result, head.offset, head.shape, body);
          const numbers = widen(result.dtype, body);
          for (const filling of this.fillings) filling.add(head.offset, head.shape, numbers);
        } else if (head.type === "end" && result) {
          share = 1;
          paint();
          const took = performance.now() - started;
          const checked = await checksum(result.bytes);
          signal.throwIfAborted();
          if (checked && checked !== head.sha256) throw new Unreachable("The reply is damaged.");
          this.finish(result, head, took, Boolean(checked));
          job.say("Done.", "good");
          return;
        }
        // Frames that have arrived already would keep the page from being painted.
        if (performance.now() - rested > PICTURE) {
          await pause(0);
          rested = performance.now();
        }
      }
    } finally {
      clearInterval(painter);
    }
    throw new Unreachable("The reply stopped before its end.");
  }

  /** Start the maps of a result. @param {number[]} shape */
  begin(shape) {
    const layer = /** @type {Layer} */ (this.layer);
    this.fillings = views(layer)
      .map((view) => new Filling(shape, view))
      .filter(({ cells }, index) => index === 0 || product(cells) > 1);
    if (this.maps.children.length !== this.fillings.length)
      this.maps.replaceChildren(
        ...this.fillings.map((_, index) => {
          const map = document.createElement("heat-map");
          map.addEventListener("choose", (event) =>
            this.choose(index, /** @type {CustomEvent<number>} */ (event).detail),
          );
          return map;
        }),
      );
    this.twin.hidden = false;
    if (this.legends) this.legends.hidden = false;
    this.paint();
  }

  paint() {
    let most = 0;
    for (const size of this.fillings[0]?.largest ?? []) if (size > most && size < Infinity) most = size;
    this.most = most;
    [...this.maps.children].forEach((child, index) => {
      const filling = /** @type {Filling} */ (this.fillings[index]);
      const { largest, arrived, whole, view, cells } = filling;
      const map = /** @type {HeatMap} */ (child);
      map.show({
        name: `Largest magnitude by ${view.name}`,
        cells,
        words: view.words,
        ends: filling.starts.map((from) => [0, (from.at(-1) ?? 1) - 1]),
        look: (cell) => {
          const value = largest[cell] ?? 0;
          if (!arrived[cell]) return { level: "level none" };
          return { level: `level ${this.sizeLevel(value)}`, faint: (arrived[cell] ?? 0) < (whole[cell] ?? 0) };
        },
        told: (cell) => this.told(filling, cell),
      });
    });
    if (this.legend)
      this.legend.textContent = `0 to ${short(most)}; cells that have not arrived in full are faint. A click or Enter shows the element in the drawing.`;
    if (this.twin.open) this.showText();
  }

  /** A cell in words. @param {Filling} filling @param {number} cell */
  told(filling, cell) {
    const { view, starts, arrived, whole, largest, place: places, shape } = filling;
    const at = filling.at(cell).map((position, axis) => {
      const from = starts[axis] ?? [];
      const [first, last] = [from[position] ?? 0, (from[position + 1] ?? 1) - 1];
      return `${view.words[axis]} ${first === last ? first : `${first} to ${last}`}`;
    });
    const [some, all] = [arrived[cell] ?? 0, whole[cell] ?? 0];
    const name = `${at.join(", ")}: `;
    if (!some) return `${name}nothing has arrived`;
    const layer = /** @type {Layer} */ (this.layer);
    const value = largest[cell] ?? 0;
    const where = `${nameOf(layer.op, OPERATIONS[layer.op].output)}[${unravel(shape, places[cell] ?? 0).join(", ")}]`;
    const counted = some < all ? `, ${some.toLocaleString("en")} of ${all.toLocaleString("en")} elements arrived` : "";
    return `${name}${short(value)}${all > 1 ? ` at ${where}` : ""}${counted}`;
  }

  /** The class of the colour of an element of the result, by its own magnitude. @param {import("./arithmetic.js").Element} element @returns {string} */
  level(element) {
    const { result, layer, resolved } = this;
    // Files may be those of another layer than the drawing's.
    if (!result || !layer || String(result.shape) !== String(resolved?.shapes[element.role])) return "";
    this.numbers ??= widen(result.dtype, result.bytes);
    return this.sizeLevel(Math.abs(this.numbers[offsetOf(result.shape, indexOf(layer, element))] ?? 0));
  }

  /** @param {number} size @returns {string} */
  sizeLevel(size) {
    return Number.isFinite(size) ? `size-${Math.ceil((LEVELS * size) / (this.most || 1))}` : "size-bad";
  }

  /** @param {number} index @param {number} cell */
  choose(index, cell) {
    const filling = this.fillings[index];
    const layer = /** @type {Layer} */ (this.layer);
    if (!filling?.arrived[cell]) return;
    const role = OPERATIONS[layer.op].output;
    const beside = { role, n: 0, i: 0, o: 0, at: [] };
    const element = elementOf(layer, role, unravel(filling.shape, filling.place[cell] ?? 0), beside);
    this.dispatchEvent(new CustomEvent("choose", { detail: element }));
  }

  showText() {
    if (!this.twin.open) return;
    const most = 12;
    this.text.replaceChildren(
      ...this.fillings.map((filling) => {
        const { largest, arrived, whole, view } = filling;
        const done = arrived.reduce((all, one) => all + one, 0) / whole.reduce((all, one) => all + one, 0);
        const order = [...largest.keys()].sort((one, other) => (largest[other] ?? 0) - (largest[one] ?? 0));
        return make(
          "section",
          {},
          make(
            "p",
            {},
            `By ${view.name}, ${Math.floor(100 * done)} % arrived${order.length > most ? `; the largest ${most} of ${order.length} cells` : ""}:`,
          ),
          make("ul", {}, ...order.slice(0, most).map((cell) => make("li", {}, this.told(filling, cell)))),
        );
      }),
    );
  }

  /** @param {Tensor} result @param {{sha256: string, stats: any}} end @param {number} took in milliseconds @param {boolean} checked */
  finish(result, { sha256, stats }, took, checked) {
    this.result = result;
    const rate = (2 * stats.gmac) / (stats.compute_ms / 1000);
    const facts = {
      [result.name]: `${result.dtype} [${result.shape.join(", ")}], ${size(result.bytes.length)}`,
      "from sending to the last byte": `${(took / 1000).toFixed(3)} s`,
      computed: `in ${short(stats.compute_ms)} ms, ${short(rate)} GFLOP/s`,
      kernel: stats.kernel,
      ...(this.choice.hidden ? {} : { algorithm: stats.algorithm }),
      tiles: String(stats.tiles),
      checksum: checked
        ? `sha256 ${sha256.slice(0, 12)}.. agrees`
        : `sha256 ${sha256.slice(0, 12)}.. (browsers compare it over HTTPS only)`,
    };
    this.facts.replaceChildren(
      ...Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    );
    this.save.textContent = `Save ${result.name}.npy`;
    this.save.hidden = false;
    this.dispatchEvent(new CustomEvent("computed", { detail: result }));
  }
}

customElements.define("run-layer", RunLayer);
