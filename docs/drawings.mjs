// Makes the drawings of drawings.json, for scripts/drawings; with --check, names those that are out of date.
import { existsSync, readFileSync, writeFileSync } from "node:fs";

import { indexOf, OPERATIONS, offsetOf, product, resolve, sizeOn } from "../app/web/arithmetic.js";
import { picture } from "../app/web/drawing.js";
import { parse } from "../app/web/state.js";
import { fill, sum } from "../app/web/values.js";
import { told } from "../app/web/words.js";

const WIDTH = 760;

const place = (path) => new URL(path, import.meta.url);
const read = (path) => readFileSync(place(path), "utf8");

/** The colours and the drawing's rules of the pages, in one line. */
function style() {
  const [colours] = read("../app/web/base.css").match(/:root \{[^}]*\}/);
  const css = `${colours}${read("../app/web/drawing.css")}.paper { fill: var(--surface) }`;
  return css
    .replace(/\/\*.*?\*\//gs, "")
    .replace(/\s+/g, " ")
    .trim();
}

/** Every combination of one position per axis. */
const positions = (sizes) =>
  sizes.reduce((found, size) => found.flatMap((at) => Array.from({ length: size }, (_, next) => [...at, next])), [[]]);

/** The inputs, and the result for the image and the channels that are drawn. */
function numbers(layer, resolved, element, kind) {
  const inputs = fill(layer, resolved, kind);
  const role = OPERATIONS[layer.op].output;
  const shape = resolved.shapes[role];
  const result = new Float32Array(product(shape));
  for (const at of positions(
    resolved.axes.map((axis) => (resolved.bias && role === "weights" ? 1 : sizeOn(axis, role))),
  )) {
    const each = { ...element, role, at };
    result[offsetOf(shape, indexOf(layer, each))] = sum(layer, resolved, inputs, each);
  }
  return { ...inputs, [role]: result };
}

/** A drawing as SVG. */
function draw({ state: text, title }, css) {
  const { state, note } = parse(`#${text}`);
  if (note) throw new RangeError(`${note} (${text})`);
  const { layer, element } = state;
  const resolved = resolve(layer);
  const values = numbers(layer, resolved, element, state.values);
  const description = told(layer, resolved, element);
  return picture(layer, resolved, element, values, { width: WIDTH, style: css, title, description });
}

const css = style();
const stale = [];
for (const [name, drawing] of Object.entries(JSON.parse(read("drawings.json")))) {
  const path = `images/drawings/${name}.svg`;
  const made = draw(drawing, css);
  if (existsSync(place(path)) && read(path) === made) continue;
  stale.push(path);
  if (!process.argv.includes("--check")) writeFileSync(place(path), made);
}
if (process.argv.includes("--check") && stale.length) {
  process.stderr.write(`out of date: ${stale.map((path) => `docs/${path}`).join(", ")} (run scripts/drawings)\n`);
  process.exitCode = 1;
}
