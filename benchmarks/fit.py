"""Fit the cost models in `kernels.costs` to measurements, so that the paths they choose lose the least time.

    python -m benchmarks.fit [FILE ...]

The files are those written by `python -m benchmarks.regret --json`, by default those in benchmarks/data; only the
ones measured on the code path of this process's target are used (CONVGRAD_TARGET chooses another one). One constant
after the other is set to the value with the least mean regret: the geometric mean, over all layers, of the time of
the chosen path over that of the best one. A value is kept unless another one is better by more than the noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import exp, log
from pathlib import Path
from unittest import mock

from benchmarks.layers import OPERATIONS, read_layers
from benchmarks.regret import ROLES, WAYS, model_costs
from kernels import ConvProblem
from kernels.costs import COSTS, Costs
from kernels.target import KNOWN, target

__all__ = ["DATA", "Measured", "fit", "read", "regrets"]

DATA = Path(__file__).with_name("data")
FACTORS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0)
ROUNDS = 4

WORTH = 0.002
"""Smallest gain in mean regret that justifies changing a constant."""


@dataclass(frozen=True)
class Measured:
    """One layer, and the milliseconds of each path that uses register tiles."""

    name: str
    problem: ConvProblem
    milliseconds: dict[str, float]


def read(paths: Sequence[Path]) -> list[Measured]:
    """Return the measurements for the code path of this process's target."""
    layers = {(layer.name, layer.op): layer for layer in read_layers(DATA.with_name("shapes.json"), [*OPERATIONS], [])}
    code_paths = {str(known): known.path for known in KNOWN}
    found = []
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        if code_paths[record["target"]] != target().path:
            continue
        for row in record["layers"]:
            problem = layers[row["layer"], row["op"]].problem(record["dtype"], row["layout"])
            times = {path: time for path, time in row["milliseconds"].items() if path in (*ROLES, *WAYS)}
            name = f"{path.stem} {row['layer']} {row['op']} {row['layout']}"
            found.append(Measured(name, problem, times))
    return found


def regrets(layers: Sequence[Measured], costs: Costs) -> list[float]:
    """Return, for each layer, the time of the path that `costs` chooses over that of the best one."""
    found = []
    with mock.patch("kernels.gradient.roles.COSTS", costs), mock.patch("kernels.forward.tiles.COSTS", costs):
        for layer in layers:
            model = {path: cost for path, cost in model_costs(layer.problem).items() if path in layer.milliseconds}
            taken = min(model, key=lambda path: model[path])
            found.append(layer.milliseconds[taken] / min(layer.milliseconds.values()))
    return found


def fit(layers: Sequence[Measured], costs: Costs = COSTS) -> Costs:
    """Return constants found by changing one at a time as long as that lowers the mean regret."""
    least = _mean(regrets(layers, costs))
    for _ in range(ROUNDS):
        before = costs
        for field in fields(costs):
            tries = [replace(costs, **{field.name: round(getattr(costs, field.name) * f, 3)}) for f in FACTORS]
            means = [_mean(regrets(layers, each)) for each in tries]
            if min(means) < least - WORTH:
                least = min(means)
                costs = tries[means.index(least)]
        if costs == before:
            break
    return costs


def _mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def main() -> None:
    """Print the regret of the current and of the fitted constants, and the worst layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="measurements; default: those in benchmarks/data")
    layers = read(parser.parse_args().files or sorted(DATA.glob("regret-*.json")))
    if not layers:
        parser.error(f"nothing was measured with {target().lanes} lanes")
    fitted = fit(layers)
    for label, costs in (("now", COSTS), ("fitted", fitted)):
        found = regrets(layers, costs)
        print(f"{label}: {len(found)} layers, mean {_mean(found):.4f}, worst {max(found):.2f}")
        for regret, layer in sorted(zip(found, layers, strict=True), key=lambda each: -each[0])[:5]:
            print(f"  {regret:.2f} {layer.name}")
    for name, value in asdict(fitted).items():
        changed = f"  (was {getattr(COSTS, name)})" if value != getattr(COSTS, name) else ""
        print(f"{name} = {value}{changed}")


if __name__ == "__main__":
    main()
