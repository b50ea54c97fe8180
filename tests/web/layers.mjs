// Answers questions about layers: a JSON list on standard input, a JSON list of answers on standard output.
import { readFileSync } from "node:fs";

import { indexOf, OPERATIONS, reach, resolve } from "../../app/web/arithmetic.js";
import { numpyLine } from "../../app/web/code.js";
import { request } from "../../app/web/layer.js";
import { axisWords, elementOf, Filling, views } from "../../app/web/maps.js";
import { narrow, widen } from "../../app/web/npy.js";
import { fragment, parse } from "../../app/web/state.js";
import { fill, sum } from "../../app/web/values.js";
import { told } from "../../app/web/words.js";

/** Every element of a tensor. */
function* elements(layer, resolved, role) {
  const sizes = resolved.axes.map((axis) => (role === "weights" ? axis.kernel : axis[role]));
  const [images, i, o] = [role === "weights" ? 1 : layer.n, role === "dst" ? 1 : layer.i, role === "src" ? 1 : layer.o];
  for (let n = 0; n < images; n++) {
    for (let a = 0; a < i; a++) {
      for (let b = 0; b < o; b++) {
        const group = [Math.floor(a / (layer.i / layer.groups)), Math.floor(b / (layer.o / layer.groups))];
        if (role === "weights" && !resolved.bias && group[0] !== group[1]) continue;
        if (role === "weights" && resolved.bias && a > 0) continue;
        const count = sizes.reduce((all, size) => all * size, 1);
        for (let flat = 0; flat < count; flat++) {
          let left = flat;
          const at = [...sizes]
            .reverse()
            .map((size) => {
              const here = left % size;
              left = Math.floor(left / size);
              return here;
            })
            .reverse();
          yield { role, n, i: a, o: b, at };
        }
      }
    }
  }
}

const answers = {
  resolve: ({ layer }) => ({ ...resolve(layer), request: request(layer) }),
  sums({ layer, kind }) {
    const resolved = resolve(layer);
    const values = fill(layer, resolved, { kind, seed: 1, typed: {} });
    const found = [...elements(layer, resolved, OPERATIONS[layer.op].output)].map((element) => {
      const { inside, times } = reach(layer, resolved, element);
      return { index: indexOf(layer, element), sum: sum(layer, resolved, values, element), count: inside * times };
    });
    const inputs = Object.fromEntries(
      Object.entries(values).map(([role, numbers]) => [OPERATIONS[layer.op].names[role], [...numbers]]),
    );
    return { resolved, inputs, sums: found };
  },
  lines({ layer, role }) {
    const resolved = resolve(layer);
    return {
      resolved,
      lines: [...elements(layer, resolved, role)].map((element) => numpyLine(layer, resolved, element)),
    };
  },
  told: ({ text }) => {
    const { state, note } = parse(text);
    const resolved = resolve(state.layer);
    return {
      note,
      lines: [told(state.layer, resolved, state.element), numpyLine(state.layer, resolved, state.element)],
    };
  },
  state: ({ text }) => {
    const { state, note } = parse(text);
    return { state, note, again: fragment(state).text };
  },
  rounded({ dtype, bits }) {
    const found = narrow(dtype, new Float32Array(Uint32Array.from(bits).buffer));
    return { bits: [...found], again: [...new Uint32Array(widen(dtype, new Uint8Array(found.buffer)).buffer)] };
  },
  filled({ layer, shape, tiles }) {
    return views(layer).map((view) => {
      const filling = new Filling(shape, view);
      for (const tile of tiles) filling.add(tile.offset, tile.shape, Float32Array.from(tile.numbers));
      const { cells, largest, place, arrived, whole } = filling;
      return { ...view, cells, largest: [...largest], place: [...place], arrived: [...arrived], whole: [...whole] };
    });
  },
  indexes({ layer }) {
    const resolved = resolve(layer);
    const role = OPERATIONS[layer.op].output;
    const beside = { role, n: 0, i: 0, o: 0, at: [] };
    return {
      words: axisWords(layer),
      wrong: [...elements(layer, resolved, role)].filter((element) => {
        const found = elementOf(layer, role, indexOf(layer, element), beside);
        const named = role === "weights" ? ["i", "o", "at"] : ["n", role === "src" ? "i" : "o", "at"];
        return !(resolved.bias && role === "weights") && named.some((name) => `${found[name]}` !== `${element[name]}`);
      }),
    };
  },
};

const questions = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(questions.map((question) => answers[question.ask](question))));
