/** Charts as SVG. Each has a twin in words: the list of its lines with their latest and largest values. */

import { make } from "./make.js";

/** A line of a chart: its values over time, null where there is none. @typedef {{name: string, values: (number | null)[]}} Line */

const [WIDTH, HEIGHT] = [360, 130];
const [LEFT, RIGHT, TOP, BOTTOM] = [38, 6, 8, 18];

/** A number with at most three digits that count. @param {number} value @returns {string} */
export const short = (value) =>
  value.toLocaleString("en", value >= 100 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });

/** The smallest of 1, 2 and 5 times a power of ten that is not below a value. @param {number} value @returns {number} */
export function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return (value <= 0 ? 1 : ([1, 2, 5].find((factor) => factor * power >= value) ?? 10)) * power;
}

/** The largest value of a line. @param {Line} line @returns {number} */
const largest = ({ values }) => values.reduce((/** @type {number} */ most, each) => Math.max(most, each ?? 0), 0);

/**
 * The SVG of lines over the last `count` seconds, the newest at the right.
 * @param {Line[]} lines @param {number} count @returns {string}
 */
export function chart(lines, count) {
  const top = ceiling(Math.max(...lines.map(largest)));
  const x = (/** @type {number} */ index) => LEFT + (index / (count - 1)) * (WIDTH - LEFT - RIGHT);
  const y = (/** @type {number} */ value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const rules = [0, top / 2, top].map(
    (value) =>
      `<path class="rule" d="M${LEFT} ${y(value)}H${WIDTH - RIGHT}"/>` +
      `<text x="${LEFT - 5}" y="${y(value) + 3.5}" text-anchor="end">${short(value)}</text>`,
  );
  const paths = lines.map(({ values }, order) => {
    let path = "";
    let drawn = false;
    values.slice(-count).forEach((value, index, shown) => {
      if (value !== null)
        path += `${drawn ? "L" : "M"}${x(index + count - shown.length).toFixed(1)} ${y(value).toFixed(1)}`;
      drawn = value !== null;
    });
    return `<path class="line line-${order}" d="${path}"/>`;
  });
  const times =
    `<text x="${LEFT}" y="${HEIGHT - 4}">${count} s ago</text>` +
    `<text x="${WIDTH - RIGHT}" y="${HEIGHT - 4}" text-anchor="end">now</text>`;
  return `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" aria-hidden="true">${rules.join("")}${paths.join("")}${times}</svg>`;
}

/** `<time-chart>`: lines over time under a heading. */
export class TimeChart extends HTMLElement {
  connectedCallback() {
    this.drawing = make("div");
    this.twin = make("ul");
    this.replaceChildren(make("h2", {}, this.getAttribute("heading") ?? ""), this.drawing, this.twin);
  }

  /** @param {Line[]} lines @param {number} count seconds */
  show(lines, count) {
    if (this.drawing) this.drawing.innerHTML = chart(lines, count);
    this.twin?.replaceChildren(
      ...lines.map((line, order) => {
        const now = line.values.at(-1) ?? null;
        const key = make("span", { class: `key line-${order}` });
        const value = make("strong", {}, now === null ? "none" : short(now));
        return make("li", {}, key, make("span", {}, `${line.name}: `, value, `, highest ${short(largest(line))}`));
      }),
    );
  }
}

customElements.define("time-chart", TimeChart);
