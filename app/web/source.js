/** `<tensor-source>`: where a tensor comes from, generated numbers or a `.npy` file that is dropped or chosen. */

import { make } from "./make.js";
import { NpyFault, readHeader } from "./npy.js";

/** @typedef {{file: File, header: import("./npy.js").Header}} Chosen */

/** Tells its page with a `change` event that there is another file, or none, and with `save` that the generated numbers are wanted. */
export class TensorSource extends HTMLElement {
  constructor() {
    super();
    /** @type {Chosen | null} */
    this.chosen = null;
    this.fault = "";
    this.refusal = "";
    this.without = "";
  }

  /**
   * @param {string} name of the tensor @param {string} role @param {string} [saves] what the button to save generated numbers is called
   */
  setUp(name, role, saves = "") {
    this.name = name;
    const wrong = `wrong-file-${name}`;
    this.expects = make("span", { class: "dim" });
    this.says = make("span", { class: "says" });
    this.wrong = make("p", { class: "wrong", id: wrong, role: "status" });
    this.input = /** @type {HTMLInputElement} */ (
      make("input", {
        type: "file",
        accept: ".npy",
        class: "twin",
        "aria-label": `File of ${name}`,
        "aria-describedby": wrong,
      })
    );
    this.drop = make("button", { type: "button" }, "Remove");
    this.save = make("button", { type: "button", "aria-label": `Save ${name}.npy` }, saves);
    this.save.hidden = !saves;
    this.replaceChildren(
      make("p", { class: `tensor role-${role}` }, make("code", {}, name), " ", this.expects),
      make(
        "div",
        { class: "zone" },
        this.says,
        make("label", { class: "button" }, this.input, "Choose a file"),
        this.drop,
        this.save,
      ),
      this.wrong,
    );
    this.input.addEventListener("change", () => {
      const file = this.input?.files?.[0];
      if (file) this.take(file);
    });
    this.drop.addEventListener("click", () => {
      this.clear();
      this.input?.focus();
    });
    this.save.addEventListener("click", () => this.dispatchEvent(new CustomEvent("save")));
    this.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.classList.add("over");
    });
    this.addEventListener("dragleave", () => this.classList.remove("over"));
    this.addEventListener("drop", (event) => {
      event.preventDefault();
      this.classList.remove("over");
      const [file, another] = event.dataTransfer?.files ?? [];
      if (!file || another) return;
      event.stopPropagation();
      this.take(file);
    });
    this.show();
    return this;
  }

  /** What the tensor has to be, and where its numbers come from without a file. @param {string} expected @param {string} without */
  expect(expected, without) {
    this.without = without;
    if (this.expects) this.expects.textContent = expected;
    this.show();
  }

  /** @param {File} file */
  async take(file) {
    this.refusal = this.fault = "";
    this.chosen = null;
    try {
      this.chosen = { file, header: await readHeader(file) };
    } catch (error) {
      if (!(error instanceof NpyFault || error instanceof DOMException)) throw error;
      this.fault = error instanceof NpyFault ? `${this.name}: ${error.message}` : `${file.name} can't be read`;
    }
    this.show();
    this.dispatchEvent(new CustomEvent("change"));
  }

  /** Forget the file. */
  clear() {
    this.chosen = null;
    this.fault = this.refusal = "";
    if (this.input) this.input.value = "";
    this.show();
    this.dispatchEvent(new CustomEvent("change"));
  }

  /** Say what is wrong with the file; nothing if empty. @param {string} refusal */
  refuse(refusal) {
    this.refusal = refusal;
    this.show();
  }

  show() {
    if (!this.says || !this.wrong || !this.drop || !this.save) return;
    const { chosen } = this;
    const has = Boolean(chosen || this.fault);
    this.says.textContent = chosen
      ? `${chosen.file.name}: ${chosen.header.dtype} [${chosen.header.shape.join(", ")}]`
      : has
        ? "no tensor"
        : this.without;
    const text = this.fault || this.refusal;
    if (this.wrong.textContent !== text) this.wrong.textContent = text;
    this.toggleAttribute("data-wrong", Boolean(text));
    if (text) this.input?.setAttribute("aria-invalid", "true");
    else this.input?.removeAttribute("aria-invalid");
    this.drop.hidden = !has;
    this.save.hidden = has || !this.save.textContent;
  }
}

customElements.define("tensor-source", TensorSource);
