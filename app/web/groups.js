/** The channels of a layer with groups: a row of src above a row of dst, and bands that join those of a group. */

import { nameOf, peers } from "./arithmetic.js";
import { make } from "./make.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Channels} Channels */

const [NAME, GAP, ROW, BAND, LARGEST] = [64, 14, 20, 26, 26];
/** The smallest cells: of groups that are beside others, with lines between them, and with numbers. */
const [LEAST, LINED, LEGIBLE] = [8, 4, 15];
const HEIGHT = 2 * ROW + BAND + 4;

/** Which channels belong together, in words. @param {Layer} layer @param {Element} element @returns {string} */
function groupText(layer, element) {
  const { src, dst } = groupOf(layer, element);
  const channels = (/** @type {Channels} */ { from, length }, /** @type {string} */ name) =>
    `${length === 1 ? `channel ${from}` : `channels ${from} to ${from + length - 1}`} of ${name}`;
  return `One of ${layer.groups} groups: ${channels(src, nameOf(layer.op, "src"))} and ${channels(dst, nameOf(layer.op, "dst"))} belong together.`;
}

/** The group of an element, and all of its channels. @param {Layer} layer @param {Element} element @returns {{group: number, src: Channels, dst: Channels}} */
function groupOf(layer, element) {
  const { src } = peers(layer, { ...element, role: "dst" });
  const { dst } = peers(layer, { ...element, role: "src" });
  return { group: src.from / src.length, src, dst };
}

/**
 * The drawing as the content of an SVG; as many groups as there is room for, with that of the element.
 * @param {Layer} layer whose groups divide its channels @param {Element} element @param {number} width @returns {string}
 */
function drawnGroups(layer, element, width) {
  const { group, src, dst } = groupOf(layer, element);
  const most = Math.max(src.length, dst.length);
  const room = width - NAME - 2 * GAP;
  const count = Math.min(layer.groups, Math.max(1, Math.floor((room + GAP) / (LEAST * most + GAP))));
  const cell = Math.min(LARGEST, ((room + GAP) / count - GAP) / most);
  const first = Math.max(0, Math.min(group - (count >> 1), layer.groups - count));
  const left = (/** @type {number} */ at, /** @type {number} */ length) =>
    NAME + GAP + (at - first) * (cell * most + GAP) + ((most - length) * cell) / 2;
  let text = "";
  for (let at = first; at < first + count; at++) {
    const [above, below] = [left(at, src.length), left(at, dst.length)];
    text += `<path class="band${at === group ? " joined" : ""}" d="M${fixed(above)} ${ROW + 2}h${fixed(cell * src.length)}L${fixed(below + cell * dst.length)} ${ROW + BAND + 2}H${fixed(below)}z"/>`;
  }
  const end = left(first + count, most) - GAP / 2;
  for (const role of /** @type {const} */ (["src", "dst"])) {
    const { length } = role === "src" ? src : dst;
    const y = role === "src" ? 2 : ROW + BAND + 2;
    const here = role === "src" ? element.i : element.o;
    const marked = role === element.role || element.role === "weights";
    text += `<g class="role-${role}"><text class="name" x="0" y="${y + 15}">${nameOf(layer.op, role)}</text>`;
    for (let at = first; at < first + count; at++) {
      const x = left(at, length);
      const box = (/** @type {number} */ channel, /** @type {number} */ channels) =>
        `M${fixed(x + channel * cell)} ${y}h${fixed(channels * cell)}v${ROW}h${fixed(-channels * cell)}z`;
      const lines = Array.from({ length: length - 1 }, (_, index) => `M${fixed(x + (index + 1) * cell)} ${y}v${ROW}`);
      text += `<path class="body" d="${box(0, length)}"/><path class="edge" d="${box(0, length)}"/>`;
      if (cell >= LINED) text += `<path class="lines" d="${lines.join("")}"/>`;
      if (at === group)
        text += `<path class="${marked ? "here" : "part"}" d="${marked ? box(here % length, 1) : box(0, length)}"/>`;
      if (cell < LEGIBLE) continue;
      for (let index = 0; index < length; index++)
        text += `<text class="value" font-size="11" x="${fixed(x + (index + 0.5) * cell)}" y="${y + ROW / 2}">${at * length + index}</text>`;
    }
    const more = (/** @type {number} */ x) =>
      `<text class="ruler" text-anchor="middle" x="${fixed(x)}" y="${y + 13}">..</text>`;
    text += `${first > 0 ? more(NAME + GAP / 2) : ""}${first + count < layer.groups ? more(end + GAP / 2) : ""}</g>`;
  }
  return text;
}

/** @param {number} value */
const fixed = (value) => Math.round(value * 10) / 10;

/** `<channel-groups>`: the drawing and its words; nothing for a layer without groups. */
export class ChannelGroups extends HTMLElement {
  constructor() {
    super();
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.classList.add("drawing");
    this.svg.setAttribute("aria-hidden", "true");
    this.words = make("p", { class: "dim" });
  }

  connectedCallback() {
    this.replaceChildren(this.svg, this.words);
  }

  /** @param {Layer} layer @param {import("./arithmetic.js").Resolved} resolved @param {Element} element */
  show(layer, resolved, element) {
    this.hidden = layer.groups === 1 || resolved.bias || !resolved.fits;
    if (this.hidden) return;
    const width = Math.max(240, this.clientWidth);
    this.svg.setAttribute("width", String(width));
    this.svg.setAttribute("height", String(HEIGHT));
    this.svg.innerHTML = drawnGroups(layer, element, width);
    this.words.textContent = groupText(layer, element);
  }
}

customElements.define("channel-groups", ChannelGroups);
