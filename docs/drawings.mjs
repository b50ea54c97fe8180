// Makes the drawings of drawings.json, for scripts/drawings; with --check, names those that are out of date.
import { existsSync, readFileSync, writeFileSync } from "node:fs";

import {
  entry,
  indexOf,
  letterOf,
  OPERATIONS,
  offsetOf,
  product,
  reach,
  resolve,
  sizeOn,
} from "../app/web/arithmetic.js";
import { base, layout, over } from "../app/web/drawing.js";
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
function numbers(layer, resolved, element, given) {
  const inputs = fill(layer, resolved, given);
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

/** A whole picture with its own style. */
function picture(layer, resolved, element, values, { width, style, title, description }) {
  const scene = layout(layer, resolved, width);
  const met = reach(layer, resolved, element).real;
  const plane = (role) =>
    role === element.role ? entry(element.at, 0) : (met[0]?.[0]?.[letterOf(resolved, role)] ?? 0);
  const planes = { src: plane("src"), weights: plane("weights"), dst: plane("dst") };
  const paths = over(layer, resolved, scene, element, planes);
  const drawn = base(layer, resolved, scene, element, planes, values)
    .replace(/data-over="([^"]*)" d=""/g, (_, name) => `d="${paths[name]}"`)
    .replace(/<path class="[^"]*" d=""\/>|<g data-(?:values|colours)="\w+"><\/g>/g, "")
    .replace(/ tabindex="0" role="application" aria-roledescription="map" aria-label="\w+"| data-\w+="\w+"/g, "")
    .replace(/<path class="focus"[^>]*>/g, "");
  const right = Math.ceil(scene.width);
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 ${right} ${Math.ceil(scene.height)}" width="${right}" ` +
    `height="${Math.ceil(scene.height)}" role="img"><title>${title}</title><desc>${description}</desc><style>${style}</style>` +
    `<rect class="paper" width="100%" height="100%"/>${drawn}</svg>\n`
  );
}

/** A drawing as SVG. */
function draw({ state: text, title }, css) {
  const { state, note } = parse(`#${text}`);
  if (note) throw new RangeError(`${note} (${text})`);
  const { layer, element } = state;
  const resolved = resolve(layer);
  const values = numbers(layer, resolved, element, state.given);
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
