/** A field over a cell of the drawing, in which its number is typed. */

import { ARROWS, make } from "./make.js";
import { readNumber, shortest } from "./values.js";

/** Pixels that a field is at least wide and high. */
const [WIDE, HIGH] = [52, 28];

/**
 * @typedef {object} Cell
 * @property {string} name of the element
 * @property {string} dtype
 * @property {number | undefined} value
 * @property {{x: number, y: number, size: number}} box within the drawing
 */

export class CellField {
  /**
   * @param {HTMLElement} place
   * @param {{type: (value: number | null) => void, move: (down: number, across: number) => void, leave: () => void}} tell
   * what was typed, or null for the generated number; where to type next; and that the keyboard goes back to the map
   */
  constructor(place, tell) {
    this.place = place;
    this.tell = tell;
    this.name = "";
    this.dtype = "f32";
    /** The text that was there, which is not typed. */
    this.before = "";
    this.isOpen = false;
    this.field = /** @type {HTMLInputElement} */ (
      make("input", {
        type: "text",
        class: "cell",
        inputmode: "text",
        autocomplete: "off",
        spellcheck: "false",
        "aria-describedby": "wrong-cell",
      })
    );
    this.wrong = make("p", { class: "wrong", id: "wrong-cell", role: "alert" });
    this.box = make("div", { class: "typing" }, this.field, this.wrong);
    this.field.addEventListener("keydown", (event) => this.press(event));
    this.field.addEventListener("input", () => this.judge(""));
    this.field.addEventListener("blur", () => this.close(true));
  }

  /** @param {Cell} cell @param {string} [text] that was typed already */
  open({ name, dtype, value, box }, text) {
    [this.name, this.dtype] = [name, dtype];
    this.before = value === undefined ? "" : shortest(dtype, value);
    this.field.setAttribute("aria-label", `Number of ${name}`);
    this.field.value = text ?? this.before;
    this.judge("");
    const [width, height] = [Math.max(WIDE, box.size), Math.max(HIGH, box.size)];
    const left = Math.min(box.x + (box.size - width) / 2, this.place.clientWidth - width);
    this.box.style.left = `${Math.max(0, left)}px`;
    this.box.style.top = `${Math.max(0, box.y + (box.size - height) / 2)}px`;
    this.box.classList.toggle("last", left > this.place.clientWidth / 2);
    this.field.style.width = `${width}px`;
    this.field.style.height = `${height}px`;
    if (!this.isOpen) this.place.append(this.box);
    this.isOpen = true;
    this.field.focus({ preventScroll: true });
    this.box.scrollIntoView({ block: "nearest" });
    if (text === undefined) this.field.select();
  }

  /** @param {string} problem */
  judge(problem) {
    this.wrong.textContent = problem;
    if (problem) this.field.setAttribute("aria-invalid", "true");
    else this.field.removeAttribute("aria-invalid");
  }

  /** Take what was typed; false where it is no number. */
  take() {
    const text = this.field.value.trim();
    if (text === this.before) return true;
    const number = text ? readNumber(this.dtype, text) : null;
    if (text && number === null) {
      this.judge(`${this.name} must be a number of ${this.dtype}, such as -1.5`);
      return false;
    }
    this.before = text;
    this.tell.type(number);
    return true;
  }

  /** @param {boolean} taken whether what was typed is taken */
  close(taken) {
    if (!this.isOpen) return;
    // Without its field the page may lose the focus, which would close it once more.
    this.isOpen = false;
    if (taken) this.take();
    this.box.remove();
  }

  /** @param {KeyboardEvent} event */
  press(event) {
    const { selectionStart: start, selectionEnd: end, value } = this.field;
    const arrow = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey ? undefined : ARROWS[event.key];
    // Within a text that is being typed, arrows move the caret.
    const whole = start === 0 && end === value.length;
    const leaves = arrow && (arrow[0] || whole || (arrow[1] < 0 ? end === 0 : start === value.length));
    if (event.key === "Escape") this.close(false);
    else if (event.key === "Enter") {
      if (this.take()) this.close(false);
    } else if (arrow && leaves) {
      if (this.take()) this.tell.move(...arrow);
    } else return;
    event.preventDefault();
    event.stopPropagation();
    if (!this.isOpen) this.tell.leave();
  }
}
