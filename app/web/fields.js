/** The form of a layer: fields and steppers, with the errors of the service beside them. */

import { nameOf, OPERATIONS, resolve, takesDst } from "./arithmetic.js";
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

/** A row as wide as the form. @param {HTMLElement} row */
function whole(row) {
  row.classList.add("whole");
  return row;
}

/**
 * The form. `change` is called with the new layer, which may be invalid. Every field is made once: those that a layer
 * lacks are hidden, so that none that is used is replaced.
 */
export class Fields {
  /** @param {HTMLElement} form @param {(layer: Layer) => void} change */
  constructor(form, change) {
    this.form = form;
    this.change = change;
    /** @type {Map<string, NumberStepper[]>} */
    this.steppers = new Map();
    /** @type {Map<string, HTMLSelectElement>} */
    this.selects = new Map();
    form.addEventListener("submit", (event) => event.preventDefault());
    this.build();
  }

  /** @param {Layer} layer */
  show(layer) {
    this.layer = layer;
    const { op, groups, auto_pad } = layer;
    const { bias, transposed } = OPERATIONS[op];
    const size = (/** @type {"src" | "dst"} */ role) => `size of ${nameOf(op, role)}`;
    const padded = !bias && auto_pad === "none";
    /** What each field that not every layer has is called; empty where this one has not. @type {Record<string, string>} */
    const labels = {
      groups: bias ? "" : "groups",
      i: bias ? "channels" : "channels I of src",
      o: bias ? "" : "channels O of dst",
      src: size(op === "BiasAddBackward" ? "dst" : "src"),
      kernel: bias ? "" : "taps of the weights",
      ...Object.fromEntries(
        ["strides", "dilations", "auto_pad", "weights_format"].map((name) => [name, bias ? "" : name]),
      ),
      pads_begin: padded ? "pads_begin" : "",
      pads_end: padded ? "pads_end" : "",
      output_padding: transposed ? "output_padding" : "",
      dst: takesDst(op) ? size("dst") : "",
      groups_axis: transposed && groups > 1 ? "groups_axis" : "",
    };
    for (const row of this.rows) {
      const label = labels[row.dataset.field ?? ""];
      if (label === undefined) continue;
      row.hidden = !label;
      /** @type {HTMLElement} */ (row.firstElementChild).textContent = label;
    }
    const { axes } = resolve(layer);
    for (const [name, steppers] of this.steppers) {
      const value = layer[/** @type {List} */ (name)];
      for (const [index, stepper] of steppers.entries()) {
        stepper.hidden = Array.isArray(value) && index >= axes.length;
        const shown = Array.isArray(value) ? value[index] : Number(value);
        stepper.show(shown, name === "dst" ? String(axes[index]?.dst) : "");
      }
    }
    const [named] = Object.entries(NAMED).find(([, each]) => JSON.stringify(each) === JSON.stringify(layer)) ?? [".."];
    const chosen = /** @type {Record<string, unknown>} */ ({ ...layer, named, rank: layer.src.length });
    for (const [name, select] of this.selects) select.value = String(chosen[name]);
    const [flat] = /** @type {HTMLSelectElement} */ (this.selects.get("rank")).options;
    if (flat) flat.disabled = op === "BiasAddBackward";
  }

  build() {
    const number = (/** @type {string} */ name, /** @type {string} */ label = name) =>
      this.row(name, label, [this.stepper(name, -1, 1)]);
    const list = (/** @type {List} */ name) =>
      this.row(
        name,
        name,
        [0, 1, 2].map((axis) => this.stepper(name, axis, LISTS[name])),
      );
    const select = (/** @type {keyof typeof CHOICES} */ name) =>
      this.choice(name, name, CHOICES[name], (value) => ({ ...this.now, [name]: value }));
    this.form.replaceChildren(
      whole(
        this.choice(
          "named",
          "start with a layer of",
          ["..", ...Object.keys(NAMED)],
          (value) => NAMED[value] ?? this.now,
        ),
      ),
      whole(this.choice("op", "operation", OPERATION_NAMES, (value) => withOperation(this.now, value))),
      this.choice("rank", "spatial axes", ["1", "2", "3"], (value) => withRank(this.now, Number(value))),
      select("dtype"),
      number("n", "images"),
      number("groups"),
      number("i"),
      number("o"),
      .../** @type {List[]} */ (["src", "kernel", "strides", "dilations"]).map(list),
      whole(select("auto_pad")),
      .../** @type {List[]} */ (["pads_begin", "pads_end", "output_padding", "dst"]).map(list),
      select("data_format"),
      select("weights_format"),
      select("groups_axis"),
    );
  }

  /** @returns {NodeListOf<HTMLElement>} */
  get rows() {
    return this.form.querySelectorAll("[data-field]");
  }

  /** @returns {Layer} */
  get now() {
    return /** @type {Layer} */ (this.layer);
  }

  /** @param {string} name @param {string} label @param {HTMLElement[]} boxes */
  row(name, label, boxes) {
    const shown = make("div", { class: boxes.length > 1 ? "boxes" : "" }, ...boxes);
    return make(
      "div",
      { class: boxes.length > 1 ? "row whole" : "row", "data-field": name },
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
    for (const row of this.rows) {
      const problem = found.get(row.dataset.field ?? "");
      /** @type {HTMLElement} */ (row.querySelector(".wrong")).textContent = problem?.msg ?? "";
      const inputs = [...row.querySelectorAll("input, select")].filter((input) => !input.closest("[hidden]"));
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
    const given = /** @type {Record<string, string>} */ ({ diff_dst: takesDst(this.now.op) ? "dst" : "src" });
    return given[String(name)] ?? fields[String(name)] ?? String(name);
  }
}
