/** `<heat-map>`: cells with colours by rows and columns, in planes beside each other where there are three axes. */

import { ARROWS, make } from "./make.js";
import { unravel } from "./maps.js";

/**
 * @typedef {object} Heat
 * @property {string} name for people
 * @property {number[]} cells on each of 1 to 3 axes
 * @property {string[]} words what the positions on them are
 * @property {number[][]} ends the first and the last position on each axis
 * @property {(cell: number) => {level: string, faint?: boolean, marked?: boolean}} look the class of a cell's colour, whether not all of it has arrived, and whether it has a circle
 * @property {(cell: number) => string} told a cell in words
 */

const [LARGEST, LEAST, TALLEST, WIDEST] = [26, 3, 352, 480];
/** Height of the single row of a map of one axis, room for the numbers, and the smallest cell with a line around it. */
const [ROW, RULER, LINED] = [18, 24, 9];
const SVG = "http://www.w3.org/2000/svg";

/** Tells its page with a `choose` event which cell was chosen. */
export class HeatMap extends HTMLElement {
  constructor() {
    super();
    /** @type {Heat | null} */
    this.heat = null;
    this.cursor = -1;
    this.cell = this.row = LEAST;
    this.svg = document.createElementNS(SVG, "svg");
    this.title_ = make("p", { class: "heat-name" });
    this.readout = make("p", { class: "readout dim", role: "status" });
  }

  connectedCallback() {
    this.svg.setAttribute("tabindex", "0");
    this.svg.setAttribute("role", "application");
    this.svg.setAttribute("aria-roledescription", "map");
    this.svg.classList.add("heat");
    this.replaceChildren(this.title_, this.svg, this.readout);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.mark(-1));
    this.svg.addEventListener("click", (event) => this.choose(this.point(event)));
    this.svg.addEventListener("keydown", (event) => this.move(event));
    this.svg.addEventListener("blur", () => this.mark(-1));
  }

  /** Planes, rows and columns. */
  get sizes() {
    const [columns = 1, rows = 1, planes = 1] = [...(this.heat?.cells ?? [])].reverse();
    return { planes, rows, columns };
  }

  /** @param {Heat} heat */
  show(heat) {
    this.heat = heat;
    this.draw();
  }

  draw() {
    const { heat } = this;
    if (!heat) return;
    const { planes, rows, columns } = this.sizes;
    const across = planes * (columns + 1) - 1;
    const room = Math.min(WIDEST, this.parentElement?.clientWidth || WIDEST) - RULER - 8;
    const size = Math.max(LEAST, Math.min(LARGEST, Math.floor(room / across), Math.floor(TALLEST / rows)));
    this.cell = size;
    this.row = rows === 1 ? Math.max(size, ROW) : size;
    const [width, height] = [RULER + across * size + 8, RULER + rows * this.row + 2];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", String(width));
    this.svg.classList.toggle("lined", size >= LINED);
    // "tap y" is y in a map by tap, and "dst channel" is dst in one by channels.
    const [right, down] = heat.words.map((word) => word.replace(/^(tap|pixel) | channel$/, "")).reverse();
    const axes = down ? `${down} down, ${right} across` : "";
    this.title_.replaceChildren(heat.name, make("span", { class: "dim" }, axes && `: ${axes}`));
    const count = planes * rows * columns;
    /** @type {Map<string, string>} */
    const paths = new Map();
    let marks = "";
    for (let cell = 0; cell < count; cell++) {
      const { level, faint, marked } = heat.look(cell);
      const name = `${level}${faint ? " faint" : ""}`;
      const [x, y] = this.corner(cell);
      paths.set(name, `${paths.get(name) ?? ""}M${x} ${y}h${size}v${this.row}h${-size}z`);
      const r = size / 2 - 1;
      if (marked && r >= 1)
        marks += `M${x + size / 2 - r} ${y + this.row / 2}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
    }
    const frames = Array.from({ length: planes }, (_, plane) => {
      const [x, y] = this.corner(plane * rows * columns);
      return `M${x} ${y}h${columns * size}v${rows * this.row}h${-columns * size}z`;
    });
    this.svg.innerHTML =
      [...paths].map(([name, path]) => `<path class="${name}" d="${path}"/>`).join("") +
      `<path class="frame" d="${frames.join("")}"/><path class="marked" d="${marks}"/>${this.rulers()}<path class="cursor" d=""/>`;
    this.mark(this.cursor < count ? this.cursor : -1);
  }

  /** The upper left corner of a cell. @param {number} cell @returns {[number, number]} */
  corner(cell) {
    const { planes, rows, columns } = this.sizes;
    const [plane = 0, row = 0, column = 0] = unravel([planes, rows, columns], cell);
    const size = this.cell;
    return [RULER + (plane * (columns + 1) + column) * size, RULER - 2 + row * this.row];
  }

  /** Positions at the ends of the axes. */
  rulers() {
    const { planes, rows, columns } = this.sizes;
    const { cell, row, heat } = this;
    if (!heat) return "";
    const [right = [], down] = [...heat.ends].reverse();
    let text = "";
    for (let plane = 0; plane < planes; plane++) {
      right.slice(0, columns > 1 && columns * cell > 40 ? 2 : 1).forEach((at, end) => {
        const x = this.corner(plane * rows * columns + end * (columns - 1))[0] + cell / 2;
        text += `<text x="${x}" y="${RULER - 8}" text-anchor="middle">${at}</text>`;
      });
    }
    down?.slice(0, rows > 1 && rows * row > 20 ? 2 : 1).forEach((at, end) => {
      text += `<text x="${RULER - 4}" y="${RULER + 1 + (end * (rows - 1) + 0.5) * row}" text-anchor="end">${at}</text>`;
    });
    return text;
  }

  /** @param {number} cell -1 for none */
  mark(cell) {
    this.cursor = cell;
    const { heat } = this;
    if (!heat) return;
    const size = this.cell;
    const [x, y] = this.corner(Math.max(0, cell));
    this.svg.querySelector(".cursor")?.setAttribute("d", cell < 0 ? "" : `M${x} ${y}h${size}v${this.row}h${-size}z`);
    this.readout.textContent = cell < 0 ? "" : heat.told(cell);
    this.svg.setAttribute("aria-label", cell < 0 ? heat.name : heat.told(cell));
  }

  /** @param {MouseEvent} event @returns {number} the cell under the pointer, or -1 */
  point(event) {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM()?.inverse());
    const { planes, rows, columns } = this.sizes;
    const size = this.cell;
    const [row, across] = [Math.floor((y - RULER + 2) / this.row), Math.floor((x - RULER) / size)];
    const [plane, column] = [Math.floor(across / (columns + 1)), across % (columns + 1)];
    const within = row >= 0 && row < rows && column >= 0 && column < columns && plane < planes;
    this.mark(within ? (plane * rows + row) * columns + column : -1);
    return this.cursor;
  }

  /** @param {number} cell */
  choose(cell) {
    if (cell >= 0) this.dispatchEvent(new CustomEvent("choose", { detail: cell }));
  }

  /** @param {KeyboardEvent} event */
  move(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { planes, rows, columns } = this.sizes;
    const arrow = ARROWS[event.key];
    if (event.key === "Enter") this.choose(this.cursor);
    else if (event.key === "Home") this.mark(0);
    else if (event.key === "End") this.mark(planes * rows * columns - 1);
    else if (arrow && this.cursor < 0) this.mark(0);
    else if (arrow) {
      const [plane = 0, row = 0, column = 0] = unravel([planes, rows, columns], this.cursor);
      const across = Math.max(0, Math.min(planes * columns - 1, plane * columns + column + arrow[1]));
      const down = Math.max(0, Math.min(rows - 1, row + arrow[0]));
      this.mark((Math.floor(across / columns) * rows + down) * columns + (across % columns));
    } else return;
    event.preventDefault();
  }
}

customElements.define("heat-map", HeatMap);
