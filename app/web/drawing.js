/**
 * A layer as SVG: src, weights and dst as grids to scale, and over them what takes part with one element.
 *
 * Nothing here needs a browser: docs/drawings.mjs makes the pictures of the documentation from it. A grid is a few paths
 * whatever its size, and a changed element changes only the paths over it.
 */

import { connected, entry, kindOf, letterOf, nameOf, OPERATIONS, reach, roles } from "./arithmetic.js";
import { numberOf } from "./values.js";

/** @typedef {import("./arithmetic.js").Layer} Layer */
/** @typedef {import("./arithmetic.js").Resolved} Resolved */
/** @typedef {import("./arithmetic.js").Element} Element */
/** @typedef {import("./arithmetic.js").Role} Role */
/** @typedef {import("./values.js").Values} Values */

/**
 * The grid of one tensor. Along each drawn axis (`rows` then `columns`) it covers positions `from` to `to`, the second
 * excluded, of which 0 to `size` are elements; taps of the weights are `step` positions apart.
 * @typedef {{from: number, to: number, size: number, step: number, axis: number}} Span
 * @typedef {{role: Role, x: number, y: number, cell: number, rows: Span, columns: Span}} Map
 * @typedef {{width: number, height: number, maps: Map[], signs: {x: number, y: number, text: string}[]}} Scene
 */

/** Largest sizes of maps that are drawn. */
export const DRAWN = 512;
const [GAP, TITLE, RULER] = [34, 40, 18];
const [LARGEST, TALLEST] = [38, 640];
/** Most numbers in the cells of one map, and the smallest cell for them. */
const [NUMBERS, LEGIBLE] = [400, 19];

/** @param {Resolved} resolved @returns {boolean} */
export const isDrawn = (resolved) =>
  resolved.axes.every(
    ({ wide, narrow, span, begin, end, dst }) => dst > 0 && Math.max(wide + begin + end, narrow, span) <= DRAWN,
  );

/** @param {Resolved} resolved @param {Role} role @param {number} axis @returns {Span} */
function spanOf(resolved, role, axis) {
  if (axis < 0) return { from: 0, to: 1, size: 1, step: 1, axis };
  const { begin, end, extra, kernel, dilation, span, wide, narrow } = entry(resolved.axes, axis);
  if (role === "weights") return { from: 0, to: span, size: kernel, step: dilation, axis };
  if (kindOf(resolved, role) === "narrow") return { from: 0, to: narrow, size: narrow, step: 1, axis };
  const after = resolved.transposed ? Math.max(0, end - extra) : end;
  return { from: -begin, to: wide + after, size: wide, step: 1, axis };
}

/** Lay the maps out in a given width. @param {Layer} layer @param {Resolved} resolved @param {number} width @returns {Scene} */
export function layout(layer, resolved, width) {
  const rank = resolved.axes.length;
  const all = roles(layer.op).map((role) => ({
    role,
    x: 0,
    y: 0,
    cell: 0,
    rows: spanOf(resolved, role, rank - 2),
    columns: spanOf(resolved, role, rank - 1),
  }));
  const across = (/** @type {Map} */ map) => map.columns.to - map.columns.from;
  const down = (/** @type {Map} */ map) => map.rows.to - map.rows.from;
  const data = all.filter((map) => map.role !== "weights");
  const tallest = Math.max(...data.map(down));
  const fit = (/** @type {number} */ room, /** @type {number} */ cells) =>
    Math.min(LARGEST, TALLEST / tallest, room / cells);
  const taps = /** @type {Map} */ (all.find((map) => map.role === "weights"));
  // Beside each other, or below each other where the cells are then twice as large.
  const columns = data.reduce((sum, map) => sum + across(map), 0);
  const least = Math.min(18, width / 4 / across(taps));
  const besides = all.length * (GAP + RULER);
  // A map is at least as wide as its title.
  const title = (/** @type {Map} */ map) =>
    8.5 * nameOf(layer.op, map.role).length + 6.5 * resolved.shapes[map.role].join(" x ").length;
  let beside = fit(width - besides, columns + across(taps));
  if (beside < least) beside = fit(width - besides - least * across(taps), columns);
  // Titles that are wider than their maps take room from all of them; each step needs a little more of it.
  for (let tries = 0; tries < 4; tries++) {
    const row = all.reduce((sum, map) => {
      const cell = map === taps ? Math.max(beside, least) : beside;
      return sum + Math.max(across(map) * cell, title(map) - 8);
    }, besides - GAP);
    if (row > width) beside *= Math.max(0.2, (columns * beside - (row - width)) / (columns * beside));
  }
  // At the right there is room for the lines that join maps below each other.
  const below = fit(width - RULER - 10, Math.max(...data.map(across)));
  const stacked = below > 2 * beside;
  const cell = Math.max(0.5, stacked ? below : beside);
  const scene = { width, height: 0, maps: all, signs: /** @type {Scene["signs"]} */ ([]) };
  let [x, y] = [RULER, TITLE];
  all.forEach((map, index) => {
    map.cell =
      map === taps ? Math.min(LARGEST, Math.max(cell, Math.min(18, (width - RULER - 10) / across(map)))) : cell;
    if (!stacked) map.cell = map === taps ? Math.max(cell, least) : cell;
    [map.x, map.y] = [x, y];
    const [w, h] = [across(map) * map.cell, down(map) * map.cell];
    scene.height = Math.max(scene.height, y + h + 4);
    const text = index === all.length - 1 ? "" : index === all.length - 2 ? "\u2192" : resolved.bias ? "+" : "*";
    if (stacked) y += h + TITLE + 10;
    else {
      const next = x + Math.max(w, title(map) - 8);
      if (text) scene.signs.push({ x: next + (GAP - 8) / 2, y: map.y + Math.min(h, 2 * LARGEST) / 2, text });
      x = next + GAP + RULER - 8;
    }
  });
  return scene;
}

/** Pixels of a position. @param {Map} map @param {Span} span @param {number} position */
const px = (map, span, position) => (span === map.rows ? map.y : map.x) + (position - span.from) * map.cell;

/** @param {number} value */
const round = (value) => Math.round(value * 10) / 10;

/** @param {Map} map @param {number} top @param {number} left @param {number} height @param {number} width @param {number} [inset] */
function box(map, top, left, height, width, inset = 0) {
  const [x, y] = [px(map, map.columns, left) + inset, px(map, map.rows, top) + inset];
  const [w, h] = [round(width * map.cell - 2 * inset), round(height * map.cell - 2 * inset)];
  return `M${round(x)} ${round(y)}h${w}v${h}h${-w}z`;
}

/** Runs of neighbours in ascending positions. @param {number[]} positions @returns {[number, number][]} */
function runs(positions) {
  /** @type {[number, number][]} */
  const found = [];
  for (const each of positions) {
    const last = found[found.length - 1];
    if (last && last[0] + last[1] === each) last[1]++;
    else found.push([each, 1]);
  }
  return found;
}

/** The path of all cells in the product of two lists of positions. @param {Map} map @param {number[]} rows @param {number[]} columns */
function cells(map, rows, columns) {
  const across = runs(columns);
  return runs(rows)
    .map(([top, height]) => across.map(([left, width]) => box(map, top, left, height, width)).join(""))
    .join("");
}

/** @param {Map} map @param {number} top @param {number} left @param {number} bottom @param {number} right */
function grid(map, top, left, bottom, right) {
  const [x, y, w, h] = [
    px(map, map.columns, left),
    px(map, map.rows, top),
    (right - left) * map.cell,
    (bottom - top) * map.cell,
  ];
  let path = "";
  if (map.cell >= 4) {
    for (let line = top + 1; line < bottom; line++)
      path += `M${round(x)} ${round(px(map, map.rows, line))}h${round(w)}`;
    for (let line = left + 1; line < right; line++)
      path += `M${round(px(map, map.columns, line))} ${round(y)}v${round(h)}`;
  }
  return path;
}

/** The grid of what lies around the elements. @param {Map} map */
function surround(map) {
  const { rows, columns } = map;
  return (
    grid(map, rows.from, columns.from, 0, columns.to) +
    grid(map, rows.size, columns.from, rows.to, columns.to) +
    grid(map, 0, columns.from, rows.size, 0) +
    grid(map, 0, columns.size, rows.size, columns.to)
  );
}

/** Diagonals over a rectangle of cells. @param {Map} map @param {number} top @param {number} left @param {number} bottom @param {number} right */
function hatch(map, top, left, bottom, right) {
  const [x, y] = [px(map, map.columns, left), px(map, map.rows, top)];
  const [w, h] = [(right - left) * map.cell, (bottom - top) * map.cell];
  if (w <= 0 || h <= 0) return "";
  let path = "";
  for (let d = 6; d < w + h; d += 6) {
    const [fromX, fromY, toX, toY] = [Math.max(0, d - h), Math.min(d, h), Math.min(d, w), Math.max(0, d - w)];
    path += `M${round(x + fromX)} ${round(y + fromY)}L${round(x + toX)} ${round(y + toY)}`;
  }
  return path;
}

/** The hatched ends of the wide map: output padding, or what no tap reads. @param {Resolved} resolved @param {Map} map */
function ends(resolved, map) {
  const unread = (/** @type {Span} */ span) => {
    if (span.axis < 0) return span.to;
    const { extra, wide, begin, end, stride, span: taps } = entry(resolved.axes, span.axis);
    return resolved.transposed ? wide - extra : span.to - ((wide + begin + end - taps) % stride);
  };
  const { rows, columns } = map;
  const [bottom, right] = [unread(rows), unread(columns)];
  const [toBottom, toRight] = resolved.transposed ? [rows.size, columns.size] : [rows.to, columns.to];
  const [top, left] = resolved.transposed ? [0, 0] : [rows.from, columns.from];
  return hatch(map, bottom, left, toBottom, toRight) + hatch(map, top, right, bottom, toRight);
}

/** Whether a map has numbers in its cells. @param {Map} map @param {Values | null} values */
const hasNumbers = ({ role, cell, rows, columns }, values) =>
  Boolean(values?.[role]) && cell >= LEGIBLE && rows.size * columns.size <= NUMBERS;

/**
 * Dots where the middle of the weights stops: one for each element of the narrow map, `low` where the cells have numbers.
 * @param {Resolved} resolved @param {Map} map @param {number} low
 */
function stops(resolved, map, low) {
  if (map.cell < 10) return "";
  const centres = (/** @type {Span} */ span) => {
    if (span.axis < 0) return [0.5];
    const { narrow, stride, begin, span: taps } = entry(resolved.axes, span.axis);
    return Array.from({ length: narrow }, (_, x) => x * stride - begin + taps / 2);
  };
  const columns = centres(map.columns);
  return centres(map.rows)
    .map((row) =>
      columns
        .map((column) => `M${round(px(map, map.columns, column))} ${round(px(map, map.rows, row) + low)}h0`)
        .join(""),
    )
    .join("");
}

/** @param {Map} map @returns {string} */
function rulers(map) {
  if (map.cell < 11) return "";
  const labels = (/** @type {Span} */ span, /** @type {boolean} */ top) => {
    if (span.axis < 0) return "";
    const every = span.step > 1 ? 1 : map.cell < 16 ? 5 : 1;
    let text = "";
    for (let at = 0; at < span.size; at += every) {
      const middle = px(map, span, at * span.step + 0.5);
      text += top
        ? `<text class="ruler" x="${round(middle)}" y="${map.y - 5}" text-anchor="middle">${at}</text>`
        : `<text class="ruler" x="${map.x - 5}" y="${round(middle + 3.5)}" text-anchor="end">${at}</text>`;
    }
    return text;
  };
  return labels(map.rows, false) + labels(map.columns, true);
}

/** The element of a map at two drawn positions. @param {Element} element @param {Map} map @param {number} row @param {number} column @returns {Element} */
export function elementAt(element, map, row, column) {
  const at = [...element.at];
  if (map.rows.axis >= 0) at[map.rows.axis] = row;
  at[map.columns.axis] = column;
  return { ...element, role: map.role, at };
}

/** A number as short as a cell. @param {number | undefined} value @returns {string} */
const inCell = (value) =>
  value === undefined
    ? ""
    : String(Number.isInteger(value) && Math.abs(value) < 1e7 ? value : Number(value.toPrecision(3)));

/** @param {Layer} layer @param {Resolved} resolved @param {Map} map @param {Element} element @param {Values | null} values */
function numbers(layer, resolved, map, element, values) {
  const { rows, columns } = map;
  if (!values || !hasNumbers(map, values)) return "";
  if (map.role === "weights" && !connected(layer, element.i, element.o)) return "";
  const room = (map.cell - 4) / 0.62;
  const cells = Array.from({ length: rows.size * columns.size }, (_, index) => {
    const [row, column] = [Math.floor(index / columns.size), index % columns.size];
    return { row, column, value: inCell(numberOf(layer, resolved, values, elementAt(element, map, row, column))) };
  });
  // All numbers of a map are as large, but for those that are very long.
  const longest = Math.max(2, ...cells.map(({ value }) => value.length));
  const common = Math.max(9, Math.min(14, map.cell / 1.5, room / longest));
  let text = "";
  for (const { row, column, value } of cells) {
    const [x, y] = [px(map, columns, column * columns.step + 0.5), px(map, rows, row * rows.step + 0.5)];
    const size = Math.min(common, map.cell / 1.5, room / Math.max(2, value.length));
    if (size >= 6)
      text += `<text class="value" x="${round(x)}" y="${round(y)}" font-size="${round(size)}">${value}</text>`;
  }
  return text;
}

/** The lines between taps that touch. @param {Map} map */
function taps(map) {
  const { rows, columns } = map;
  const whole = { ...map, rows: { ...rows, step: 1 }, columns: { ...columns, step: 1 } };
  if (rows.step === 1 && columns.step === 1) return grid(whole, 0, 0, rows.to, columns.to);
  if (rows.step === 1)
    return steps(columns)
      .map((left) => grid(whole, 0, left, rows.to, left + 1))
      .join("");
  if (columns.step === 1)
    return steps(rows)
      .map((top) => grid(whole, top, 0, top + 1, columns.to))
      .join("");
  return "";
}

/** Which paths lie over each map. */
const OVER = /** @type {const} */ (["padded", "part", "window", "here", "step"]);
/** Paths over the maps, by role and class; `links` joins the elements of one product. @typedef {Record<string, string>} Over */

/**
 * The SVG of a layer without its outermost element. `element` says which image, channels and planes are shown.
 * @param {Layer} layer @param {Resolved} resolved @param {Scene} scene @param {Element} element @param {Record<Role, number>} planes
 * @param {Values | null} values @returns {string}
 */
export function base(layer, resolved, scene, element, planes, values) {
  const narrow = resolved.transposed ? "src" : "dst";
  const parts = scene.maps.map((map) => {
    const { role, rows, columns } = map;
    const name = nameOf(layer.op, role);
    const wide = kindOf(resolved, role) === "wide" && !resolved.bias;
    const shown = { ...element, at: [...element.at] };
    if (shown.at.length === 3) shown.at[0] = planes[role];
    const body = role === "weights" ? cells(map, steps(rows), steps(columns)) : box(map, 0, 0, rows.size, columns.size);
    return (
      `<g class="map role-${role} beside-${narrow}" data-role="${role}" tabindex="0" role="application" aria-roledescription="map" aria-label="${name}">` +
      `<text class="name" x="${round(map.x)}" y="${map.y - 24}">${name} <tspan class="shape" font-weight="400" font-size="12">${resolved.shapes[role].join(" x ")}</tspan></text>` +
      `<path class="body" d="${body}"/><g data-colours="${role}"></g>` +
      (wide
        ? `<path class="frame" d="${box(map, rows.from, columns.from, rows.to - rows.from, columns.to - columns.from)}${surround(map)}"/>`
        : "") +
      (role === "weights"
        ? `<path class="frame" d="${box(map, 0, 0, rows.to, columns.to)}"/><path class="lines" d="${body}${taps(map)}"/>`
        : `<path class="lines" d="${grid(map, 0, 0, rows.size, columns.size)}"/><path class="edge" d="${box(map, 0, 0, rows.size, columns.size)}"/>`) +
      (wide
        ? `<path class="hatch" d="${ends(resolved, map)}"/><path class="stops" stroke-width="${round(Math.max(2, Math.min(5, map.cell / 6)))}" d="${stops(resolved, map, hasNumbers(map, values) ? 0.36 * map.cell : 0)}"/>`
        : "") +
      OVER.map((kind) => `<path class="${kind}" data-over="${role}-${kind}" d=""/>`).join("") +
      `<g data-values="${role}">${numbers(layer, resolved, map, shown, values)}</g>` +
      rulers(map) +
      `<path class="focus" d="${box(map, rows.from, columns.from, rows.to - rows.from, columns.to - columns.from, -3)}"/></g>`
    );
  });
  const signs = scene.signs.map(
    ({ x, y, text }) => `<text class="sign" x="${round(x)}" y="${round(y)}">${text}</text>`,
  );
  return `${parts.join("")}<path class="links" data-over="links" d=""/>${signs.join("")}`;
}

/** Most cells of a map that are coloured. */
const COLOURED = 16384;

/**
 * Cells with colours, as paths by class; nothing where there are too many.
 * @param {Map} map @param {Element} element whose image, channels and plane are shown @param {(element: Element) => string} level the class of an element's colour, or nothing
 * @returns {string}
 */
export function coloured(map, element, level) {
  const { rows, columns } = map;
  if (rows.size * columns.size > COLOURED) return "";
  /** @type {Record<string, string>} */
  const paths = {};
  for (let row = 0; row < rows.size; row++) {
    for (let column = 0; column < columns.size; column++) {
      const name = level(elementAt(element, map, row, column));
      if (name) paths[name] = (paths[name] ?? "") + box(map, row * rows.step, column * columns.step, 1, 1);
    }
  }
  return Object.entries(paths)
    .map(([name, path]) => `<path class="level ${name}" d="${path}"/>`)
    .join("");
}

/** Positions of the elements of a span. @param {Span} span @returns {number[]} */
const steps = (span) => Array.from({ length: span.size }, (_, index) => index * span.step);

/** @param {number[]} given @returns {number[]} */
const unique = (given) => [...new Set(given)].sort((first, second) => first - second);

/**
 * The paths over the maps for an element, and for one of its products.
 * @param {Layer} layer @param {Resolved} resolved @param {Scene} scene @param {Element} element @param {Record<Role, number>} planes
 * @param {Record<Role, Element> | null} [term] @returns {Over}
 */
export function over(layer, resolved, scene, element, planes, term = null) {
  /** @type {Over} */
  const paths = { links: "" };
  const { real, all, inside } = reach(layer, resolved, element);
  const [firstReal, firstAll] = [entry(real, 0), entry(all, 0)];
  const joined = connected(layer, element.i, element.o);
  for (const map of scene.maps) {
    const { role, rows, columns } = map;
    for (const kind of OVER) paths[`${role}-${kind}`] = "";
    const letter = letterOf(resolved, role);
    const plane = rows.axis === 1 ? planes[role] : null;
    if (role === element.role) {
      const onPlane = plane === null || plane === element.at[0];
      if (onPlane) paths[`${role}-here`] = cellOf(map, element.at);
      continue;
    }
    if (!joined) continue;
    const positions = (/** @type {Span} */ span, /** @type {import("./arithmetic.js").Meeting[][]} */ from) =>
      span.axis < 0 ? [0] : unique(entry(from, span.axis).map((met) => met[letter] * span.step));
    const meets = plane === null || firstReal.some((met) => met[letter] === plane);
    if (meets && inside) paths[`${role}-part`] = cells(map, positions(rows, real), positions(columns, real));
    if (kindOf(resolved, role) === "wide" && (plane === null || firstAll.some((met) => met[letter] === plane))) {
      const within = (/** @type {Span} */ span, /** @type {number} */ at) => at >= span.from && at < span.to;
      const [down, across] = [
        positions(rows, all).filter((at) => within(rows, at)),
        positions(columns, all).filter((at) => within(columns, at)),
      ];
      const outside = (/** @type {Span} */ span, /** @type {number[]} */ list) =>
        list.filter((at) => at < 0 || at >= span.size);
      const insideRows = down.filter((at) => at >= 0 && at < rows.size);
      paths[`${role}-padded`] =
        cells(map, outside(rows, down), across) + cells(map, insideRows, outside(columns, across));
      if (kindOf(resolved, element.role) === "narrow" && !resolved.bias) {
        const [top, left] = [
          rows.axis < 0 ? 0 : start(resolved, element, rows.axis),
          start(resolved, element, columns.axis),
        ];
        paths[`${role}-window`] = box(
          map,
          top,
          left,
          rows.axis < 0 ? 1 : entry(resolved.axes, rows.axis).span,
          entry(resolved.axes, columns.axis).span,
        );
      }
    }
  }
  if (term) link(paths, scene, term, planes);
  return paths;
}

/** The position of the first tap for a narrow element. @param {Resolved} resolved @param {Element} element @param {number} axis */
function start(resolved, element, axis) {
  const { stride, begin } = entry(resolved.axes, axis);
  return entry(element.at, axis) * stride - begin;
}

/** @param {Map} map @param {number[]} at @returns {string} */
function cellOf(map, at) {
  const { rows, columns } = map;
  return box(map, rows.axis < 0 ? 0 : entry(at, rows.axis) * rows.step, entry(at, columns.axis) * columns.step, 1, 1);
}

/** The upper left corner of an element's cell, and its size. @param {Map} map @param {number[]} at */
export function boxOf(map, at) {
  const { rows, columns, cell } = map;
  const row = rows.axis < 0 ? 0 : entry(at, rows.axis) * rows.step;
  return { x: px(map, columns, entry(at, columns.axis) * columns.step), y: px(map, rows, row), size: cell };
}

/**
 * Join the elements of one product by lines between the cells, never over one: a number may be in it.
 * @param {Over} paths @param {Scene} scene @param {Record<Role, Element>} term @param {Record<Role, number>} planes
 */
function link(paths, scene, term, planes) {
  const ends = scene.maps.flatMap((map) => {
    const { at } = term[map.role];
    if (map.rows.axis === 1 && planes[map.role] !== at[0]) return [];
    paths[`${map.role}-step`] = cellOf(map, at);
    const { x, y, size } = boxOf(map, at);
    return [{ map, left: x, right: x + size, y: round(y + size) }];
  });
  let path = "";
  ends.slice(1).forEach((to, index) => {
    const from = entry(ends, index);
    const start = `M${round(from.right)} ${from.y}`;
    const edge = rightOf(from.map);
    // Side by side a line leaves at the right and comes in from the left, beyond the numbers of the rows; else both ends are at the right.
    path +=
      to.map.y === from.map.y
        ? `${start}H${round(edge)}L${round(Math.max(edge, to.map.x - RULER))} ${to.y}H${round(to.left)}`
        : `${start}H${round(scene.width - 3)}V${to.y}H${round(to.right)}`;
  });
  paths.links = path;
}

/** The right edge of a map. @param {Map} map @returns {number} */
const rightOf = (map) => px(map, map.columns, map.columns.to);

/**
 * The element of a map at a point, or null.
 * @param {Scene} scene @param {number} x @param {number} y @returns {{map: Map, row: number, column: number} | null}
 */
export function hit(scene, x, y) {
  for (const map of scene.maps) {
    const place = (/** @type {Span} */ span, /** @type {number} */ at) => {
      const position = Math.floor((at - px(map, span, span.from)) / map.cell) + span.from;
      const index = position / span.step;
      return Number.isInteger(index) && index >= 0 && index < span.size ? index : -1;
    };
    const [row, column] = [place(map.rows, y), place(map.columns, x)];
    if (row >= 0 && column >= 0) return { map, row, column };
  }
  return null;
}

/** Whether a role is what the operation computes. @param {Layer} layer @param {Role} role */
export const isOutput = (layer, role) => OPERATIONS[layer.op].output === role;
