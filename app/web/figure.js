/** `<layer-drawing>`: the drawing of a layer that follows the pointer and the keyboard. */

import { entry, nameOf } from "./arithmetic.js";
import { base, boxOf, coloured, DRAWN, elementAt, hit, isDrawn, isOutput, layout, over } from "./drawing.js";
import { ARROWS } from "./make.js";
import { CellField } from "./typing.js";
import { numberOf, shortest } from "./values.js";
import { label, told } from "./words.js";

/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Role} Role */
/** Gives an element of the result the class of its colour, or none; `beneath` numbers too. @typedef {{of: (element: Element) => string, beneath: boolean}} Colours */
/**
 * @typedef {object} Shown
 * @property {import("./arithmetic.js").Layer} layer
 * @property {import("./arithmetic.js").Resolved} resolved
 * @property {Element} element the one that is marked; its image and channels are drawn
 * @property {Record<Role, number>} planes positions on the first of three axes
 * @property {import("./values.js").Values | null} values
 * @property {Record<Role, Element> | null} term one product of the element
 * @property {Colours | null} colours of the result
 * @property {Role[]} typed the tensors whose numbers can be typed
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Tells its page by events: `point` and `keep` with an element, `leave`, `type` with a new number for the element that is
 * kept (null for the generated one), and `key` with a key that it doesn't use.
 */
export class LayerDrawing extends HTMLElement {
  constructor() {
    super();
    /** @type {Shown | null} */
    this.shown = null;
    /** @type {import("./drawing.js").Scene | null} */
    this.scene = null;
    this.frame = 0;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.classList.add("drawing");
    /** @type {Map<string, SVGElement>} */
    this.paths = new Map();
    this.field = new CellField(this, {
      type: (value) => this.dispatchEvent(new CustomEvent("type", { detail: value })),
      move: (down, across) => {
        const { element } = /** @type {Shown} */ (this.shown);
        const map = this.scene?.maps.find((each) => each.role === element.role);
        if (map) this.tell("keep", this.neighbour(map, element, down, across));
        this.type();
      },
      leave: () => this.focusOn(this.shown?.element.role),
    });
  }

  connectedCallback() {
    this.append(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.follow(event, "point"));
    this.svg.addEventListener("pointerleave", () => {
      cancelAnimationFrame(this.frame);
      this.tell("leave");
    });
    this.svg.addEventListener("click", (event) => this.follow(event, "keep"));
    this.svg.addEventListener("mousedown", (event) => this.press(event));
    this.svg.addEventListener("keydown", (event) => this.move(event));
    let width = 0;
    new ResizeObserver(() => {
      if (Math.abs(this.clientWidth - width) < 1) return;
      width = this.clientWidth;
      if (this.shown) this.show(this.shown);
    }).observe(this);
  }

  /** Draw everything. @param {Shown} shown */
  show(shown) {
    this.shown = shown;
    const { layer, resolved, element, planes, values } = shown;
    this.paths.clear();
    const focused = this.svg.contains(document.activeElement)
      ? document.activeElement?.getAttribute("data-role")
      : null;
    if (!isDrawn(resolved)) {
      this.scene = null;
      this.svg.setAttribute("viewBox", "0 0 400 40");
      this.svg.innerHTML = `<text y="24">Nothing to draw: maps have 1 to ${DRAWN} elements on each axis.</text>`;
      return;
    }
    this.scene = layout(layer, resolved, Math.max(240, this.clientWidth));
    const { width, height } = this.scene;
    this.svg.setAttribute("viewBox", `0 0 ${Math.ceil(width)} ${Math.ceil(height)}`);
    this.svg.setAttribute("width", String(Math.ceil(width)));
    this.svg.setAttribute("height", String(Math.ceil(height)));
    this.svg.innerHTML = base(layer, resolved, this.scene, element, planes, values);
    this.colour(shown, this.scene);
    for (const path of this.svg.querySelectorAll("[data-over]")) {
      this.paths.set(path.getAttribute("data-over") ?? "", /** @type {SVGElement} */ (path));
    }
    this.mark(shown);
    if (focused) this.focusOn(focused);
  }

  /** @param {string | undefined} role */
  focusOn(role) {
    const map = /** @type {SVGElement | null} */ (this.svg.querySelector(`[data-role="${role}"]`));
    map?.focus({ preventScroll: true });
  }

  /** Have the number of the marked element typed, if it can be. @param {string} [text] its beginning @returns {boolean} */
  type(text) {
    const { layer, resolved, element, values, typed } = /** @type {Shown} */ (this.shown);
    const map = this.scene?.maps.find((each) => each.role === element.role);
    if (!map || !typed.includes(element.role)) return false;
    this.tell("keep", element);
    const value = values ? numberOf(layer, resolved, values, element) : undefined;
    this.field.open({ name: label(layer, element), dtype: layer.dtype, value, box: boxOf(map, element.at) }, text);
    return true;
  }

  /** A neighbour of an element, or itself at the end of a map. @param {import("./drawing.js").Map} map @param {Element} element @param {number} down @param {number} across */
  neighbour(map, element, down, across) {
    const to = (/** @type {import("./drawing.js").Span} */ { axis, size }, /** @type {number} */ by) =>
      axis < 0 ? 0 : Math.max(0, Math.min(entry(element.at, axis) + by, size - 1));
    return this.at(map, to(map.rows, down), to(map.columns, across));
  }

  /** Colour the result. @param {Shown} shown @param {import("./drawing.js").Scene} scene */
  colour({ layer, element, planes, colours }, scene) {
    const map = scene.maps.find((each) => isOutput(layer, each.role));
    if (!map || !colours) return;
    const [below, numbers] = ["colours", "values"].map((name) =>
      this.svg.querySelector(`[data-${name}="${map.role}"]`),
    );
    if (!below || (numbers?.childElementCount && !colours.beneath)) return;
    const at = element.at.length === 3 ? element.at.with(0, planes[map.role]) : element.at;
    below.innerHTML = coloured(map, { ...element, at }, colours.of);
  }

  /** Mark another element or product on the same drawing. @param {Shown} shown */
  mark(shown) {
    this.shown = shown;
    if (!this.scene) return;
    const { layer, resolved, element, planes, values, term } = shown;
    const paths = over(layer, resolved, this.scene, element, planes, term);
    for (const [name, path] of this.paths) path.setAttribute("d", paths[name] ?? "");
    const number = values ? numberOf(layer, resolved, values, element) : undefined;
    const is = number === undefined ? "" : ` Its number is ${shortest(layer.dtype, number)}.`;
    const map = this.svg.querySelector(`[data-role="${element.role}"]`);
    map?.setAttribute("aria-label", `${nameOf(layer.op, element.role)}: ${told(layer, resolved, element)}${is}`);
  }

  /** The cell under the pointer. @param {MouseEvent} event */
  cellAt(event) {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM()?.inverse());
    return this.scene && hit(this.scene, x, y);
  }

  /** @param {MouseEvent} event @param {"point" | "keep"} name */
  follow(event, name) {
    cancelAnimationFrame(this.frame);
    const act = () => {
      const found = this.cellAt(event);
      if (found) this.tell(name, this.at(found.map, found.row, found.column));
      else if (name === "point") this.tell("leave");
    };
    if (name === "keep") act();
    else this.frame = requestAnimationFrame(act);
  }

  /** Keep an element with the first press, and type its number with the second. A click is lost where the drawing changes before its end. @param {MouseEvent} event */
  press(event) {
    if (event.button) return;
    const typed = this.field.isOpen;
    this.field.close(true);
    this.follow(event, "keep");
    // The browser would move the focus from what it has just got.
    if (event.detail === 2 && this.cellAt(event) && this.type()) event.preventDefault();
    else if (typed) {
      this.focusOn(this.shown?.element.role);
      event.preventDefault();
    }
  }

  /** @param {import("./drawing.js").Map} map @param {number} row @param {number} column @returns {Element} */
  at(map, row, column) {
    const { element, planes } = /** @type {Shown} */ (this.shown);
    const found = elementAt(element, map, row, column);
    if (found.at.length === 3) found.at[0] = planes[map.role];
    return found;
  }

  /** @param {KeyboardEvent} event */
  move(event) {
    const role = /** @type {Role} */ (
      /** @type {SVGElement} */ (event.target).closest("[data-role]")?.getAttribute("data-role")
    );
    const map = this.scene?.maps.find((each) => each.role === role);
    if (!map || !this.shown || event.altKey || event.ctrlKey || event.metaKey) return;
    const { element, planes } = this.shown;
    const here = element.role === role;
    const { size } = map.columns;
    const ends = { Home: [0, -size], End: [0, size] }[event.key];
    // The first arrow marks the middle.
    const from = here ? element : this.at(map, (map.rows.size - 1) >> 1, (size - 1) >> 1);
    const arrow = ends ?? (here ? ARROWS[event.key] : event.key === "Enter" || ARROWS[event.key] ? [0, 0] : undefined);
    if (arrow) this.tell("keep", this.neighbour(map, from, entry(arrow, 0), entry(arrow, 1)));
    else if (here && /^([\d.]|Enter|F2)$/.test(event.key)) {
      if (!this.type(event.key.length === 1 ? event.key : undefined)) return;
    } else if ([" ", "+", "-", "Escape", "PageUp", "PageDown"].includes(event.key)) {
      this.dispatchEvent(new CustomEvent("key", { detail: { key: event.key, role, plane: planes[role] } }));
    } else return;
    event.preventDefault();
  }

  /** @param {string} name @param {Element} [element] */
  tell(name, element) {
    this.dispatchEvent(new CustomEvent(name, { detail: element }));
  }
}

customElements.define("layer-drawing", LayerDrawing);
