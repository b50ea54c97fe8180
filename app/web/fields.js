/** The form of a layer: fields and steppers, with the errors of the service beside them. */

import { entry, nameOf, OPERATIONS, resolve, takesDst } from "./arithmetic.js";
import { CHOICES, LISTS, MOST, NAMED, withOperation, withRank } from "./layer.js";
import { make } from "./make.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {keyof typeof LISTS} List */

const OPERATION_NAMES = /** @type {Layer["op"][]} */ (Object.keys(OPERATIONS));

/** `<number-stepper>`: a field for an integer between two buttons; a `change` event has its value, or null if it is empty. */
class NumberStepper extends HTMLElement {
  /** @param {string} label @param {string} described id of the errors @param {number} least */
  setUp(label, described, least) {
    this.least = least;
    this.field = /** @type {HTMLInputElement} */ (
      make("input", {
        type: "number",
        min: String(least),
        max: String(MOST),
        step: "1",
        inputmode: "numeric",
        "aria-label": label,
        "aria-describedby": described,
      })
    );
    this.classList.add("stepper");
    const button = (/** @type {string} */ text, /** @type {number} */ by) => {
      const made = make(
        "button",
        { type: "button", "aria-label": `${label}: ${by > 0 ? "one more" : "one less"}`, tabindex: "-1" },
        text,
      );
      made.addEventListener("click", () => this.give(Number(this.field?.value || this.field?.placeholder) + by));
      return made;
    };
    this.append(button("\u2212", -1), this.field, button("+", 1));
    this.field.addEventListener("input", () => {
      const text = this.field?.value.trim() ?? "";
      if (/^\d+$/.test(text)) this.give(Number(text), true);
      else if (text === "" && !this.field?.validity.badInput)
        this.dispatchEvent(new CustomEvent("change", { detail: null }));
    });
    // The form's own change events have no value.
    this.field.addEventListener("change", (event) => event.stopPropagation());
    return this;
  }

  /** @param {number} value @param {boolean} [typed] */
  give(value, typed = false) {
    const kept = Math.max(this.least ?? 0, Math.min(value, MOST));
    if (!typed && this.field) this.field.value = String(kept);
    this.dispatchEvent(new CustomEvent("change", { detail: kept }));
  }

  /** @param {number | undefined} value @param {string} [placeholder] */
  show(value, placeholder = "") {
    const field = /** @type {HTMLInputElement} */ (this.field);
    field.placeholder = placeholder;
    // What is being typed stays as it is.
    if (
      document.activeElement !== field ||
      (value !== undefined &&
        field.value !== "" &&
        Number(field.value) !== value &&
        Number(field.value) >= (this.least ?? 0))
    ) {
      field.value = value === undefined ? "" : String(value);
    }
  }
}

customElements.define("number-stepper", NumberStepper);

/** The form. `change` is called with the new layer, which may be invalid. */
export class Fields {
  /** @param {HTMLElement} form @param {(layer: Layer) => void} change */
  constructor(form, change) {
    this.form = form;
    this.change = change;
    this.built = "";
    /** @type {Map<string, NumberStepper[]>} */
    this.steppers = new Map();
    /** @type {Map<string, HTMLSelectElement>} */
    this.selects = new Map();
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** @param {Layer} layer */
  show(layer) {
    this.layer = layer;
    const { bias, transposed } = OPERATIONS[layer.op];
    const grouped = Boolean(transposed && layer.groups > 1);
    const kind = [layer.op, layer.src.length, grouped, layer.auto_pad !== "none"].join();
    if (kind !== this.built) this.build(layer, Boolean(bias), transposed, grouped);
    this.built = kind;
    const { axes } = resolve(layer);
    for (const [name, steppers] of this.steppers) {
      const value = layer[/** @type {List} */ (name)];
      steppers.forEach((stepper, index) => {
        if (!Array.isArray(value)) stepper.show(/** @type {number} */ (/** @type {unknown} */ (value)));
        else stepper.show(value[index], name === "dst" ? String(entry(axes, index).dst) : "");
      });
    }
    for (const [name, select] of this.selects) {
      if (name === "rank") select.value = String(layer.src.length);
      else if (name !== "named") select.value = String(layer[/** @type {keyof Layer} */ (name)]);
    }
  }

  /** @param {Layer} layer @param {boolean} bias @param {boolean} transposed @param {boolean} grouped */
  build(layer, bias, transposed, grouped) {
    this.steppers.clear();
    this.selects.clear();
    const size = (/** @type {"src" | "dst"} */ role) => `size of ${nameOf(layer.op, role)}`;
    const data = layer.op === "BiasAddBackward" ? "dst" : "src";
    const names = /** @type {Record<string, string>} */ ({
      n: "images",
      i: bias ? "channels" : "channels I of src",
      o: "channels O of dst",
    });
    const number = (/** @type {string} */ name) => this.row(name, names[name] ?? name, [this.stepper(name, -1, 1)]);
    const list = (/** @type {List} */ name, label = /** @type {string} */ (name)) =>
      this.row(
        name,
        label,
        layer.src.map((_, axis) => this.stepper(name, axis, LISTS[name])),
      );
    const select = (/** @type {keyof typeof CHOICES} */ name) =>
      this.choice(name, name, CHOICES[name], (value) => ({ ...this.now, [name]: value }));
    const pair = (/** @type {HTMLElement[]} */ ...rows) => make("div", { class: "pair" }, ...rows);
    const padded = layer.auto_pad === "none";
    const focused = document.activeElement?.id;
    this.form.replaceChildren(
      this.choice("named", "start with a layer of", ["..", ...Object.keys(NAMED)], (value) => NAMED[value] ?? this.now),
      this.choice("op", "operation", OPERATION_NAMES, (value) => withOperation(this.now, value)),
      pair(
        this.choice("rank", "spatial axes", layer.op === "BiasAddBackward" ? ["2", "3"] : ["1", "2", "3"], (value) =>
          withRank(this.now, Number(value)),
        ),
        select("dtype"),
      ),
      ...(bias
        ? [pair(number("n"), number("i")), list("src", size(data)), select("data_format")]
        : [
            pair(number("n"), number("groups")),
            pair(number("i"), number("o")),
            list("src", size("src")),
            list("kernel", "taps of the weights"),
            list("strides"),
            list("dilations"),
            select("auto_pad"),
            ...(padded ? [list("pads_begin"), list("pads_end")] : []),
            ...(transposed ? [list("output_padding")] : []),
            ...(takesDst(layer.op) ? [list("dst", size("dst"))] : []),
            pair(select("data_format"), select("weights_format")),
            ...(grouped ? [select("groups_axis")] : []),
          ]),
    );
    if (focused) document.getElementById(focused)?.focus();
  }

  /** @returns {Layer} */
  get now() {
    return /** @type {Layer} */ (this.layer);
  }

  /** @param {string} name @param {string} label @param {HTMLElement[]} boxes */
  row(name, label, boxes) {
    const shown = make("div", { class: boxes.length > 1 || name in LISTS ? "boxes" : "" }, ...boxes);
    return make(
      "div",
      { class: "row", "data-field": name },
      make("span", {}, label),
      shown,
      make("p", { class: "wrong", id: `wrong-${name}` }),
    );
  }

  /** @param {string} name @param {number} axis @param {number} least */
  stepper(name, axis, least) {
    const stepper = /** @type {NumberStepper} */ (document.createElement("number-stepper"));
    const named =
      {
        src: "size of src",
        dst: "size of dst",
        i: "channels of src",
        o: "channels of dst",
        n: "images",
        kernel: "taps",
      }[name] ?? name;
    stepper.setUp(axis < 0 ? named : `${named}, axis ${axis}`, `wrong-${name}`, least);
    this.steppers.set(name, [...(this.steppers.get(name) ?? []), stepper]);
    stepper.addEventListener("change", (event) => {
      const value = /** @type {CustomEvent<number | null>} */ (event).detail;
      const layer = this.now;
      if (axis < 0) {
        if (value !== null)
          this.change({ ...layer, [name]: value, ...(OPERATIONS[layer.op].bias && name === "i" ? { o: value } : {}) });
        return;
      }
      let list = [...layer[/** @type {List} */ (name)]];
      if (value === null && name !== "dst") return;
      if (name === "dst") {
        if (!list.length) list = resolve(layer).axes.map((each) => each.dst);
        list = value === null ? [] : list.with(axis, value);
      } else list[axis] = value ?? least;
      this.change({ ...layer, [name]: list });
    });
    return stepper;
  }

  /**
   * @template {string} Word
   * @param {string} name @param {string} label @param {readonly Word[]} values @param {(value: Word) => Layer} apply
   */
  choice(name, label, values, apply) {
    const select = /** @type {HTMLSelectElement} */ (
      make(
        "select",
        { id: `field-${name}`, "aria-describedby": `wrong-${name}` },
        ...values.map((value) => make("option", {}, value)),
      )
    );
    select.addEventListener("change", () => this.change(apply(/** @type {Word} */ (select.value))));
    this.selects.set(name, select);
    const titled = make("label", { for: select.id }, label);
    return make(
      "div",
      { class: "row", "data-field": name },
      titled,
      select,
      make("p", { class: "wrong", id: `wrong-${name}` }),
    );
  }

  /** Show broken rules beside their fields. @param {{loc: (string | number)[], msg: string}[]} problems */
  mark(problems) {
    const found = new Map(problems.map((problem) => [this.fieldOf(problem.loc), problem]));
    for (const row of this.form.querySelectorAll("[data-field]")) {
      const problem = found.get(row.getAttribute("data-field") ?? "");
      /** @type {HTMLElement} */ (row.querySelector(".wrong")).textContent = problem?.msg ?? "";
      const inputs = row.querySelectorAll("input, select");
      const axis = problem?.loc[problem.loc.length - 1];
      inputs.forEach((input, index) => {
        const wrong =
          problem &&
          (inputs.length === 1 || typeof axis !== "number" || problem.loc[0] !== "attributes" || axis === index);
        if (wrong) input.setAttribute("aria-invalid", "true");
        else input.removeAttribute("aria-invalid");
      });
    }
  }

  /** The field of a place in the request. @param {(string | number)[]} loc @returns {string} */
  fieldOf([, name]) {
    const fields = /** @type {Record<string, string>} */ ({
      weights: "kernel",
      weights_shape: "kernel",
      dst_shape: "src",
      bias: "i",
    });
    const given = /** @type {Record<string, string>} */ ({ diff_dst: this.steppers.has("dst") ? "dst" : "src" });
    return given[String(name)] ?? fields[String(name)] ?? String(name);
  }
}
