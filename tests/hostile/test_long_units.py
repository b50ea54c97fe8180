"""Calls with long units and small results: another client's small calls do not wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import convgrad
from tests.app.pool.fleet import Frozen
from tests.app.resident import Resident, resident_service
from tests.app.samples import digest
from tests.hostile.apis import TINY
from tests.problems import Case

# As few bytes as this: 1,000 images of one pixel, and 3,375 taps.
ATTACK = Case(
    n=1000, src_channels=1, dst_channels=1, src_spatial=(1, 1, 1), dst_spatial=(1, 1, 1), kernel=(15, 15, 15),
    pads_begin=(7, 7, 7), pads_end=(7, 7, 7),
)  # fmt: skip


@pytest.fixture(scope="module", params=["keys", "no keys"])
def attacked(request: pytest.FixtureRequest) -> Iterator[tuple[Resident, list[str | None]]]:
    """A service with one worker and a spare one, and the keys of an attacker and of another client."""
    keys: list[str | None] = [None, None]
    settings: dict[str, Any] = {"workers": 1}
    if request.param == "keys":
        keys = ["cg_the-key-of-the-attacker", "cg_the-key-of-another-client"]
        settings["keys"] = ";".join(f"{name} {digest(key or '')}" for name, key in zip("ab", keys, strict=True))
    with resident_service(**settings) as resident:
        resident.until(lambda: all(worker["ready"] for worker in workers(resident)) and len(workers(resident)) == 2)
        yield resident, keys


def workers(resident: Resident) -> list[dict[str, Any]]:
    """Return the workers as in the snapshot."""
    found: list[dict[str, Any]] = resident.service.engine.snapshot()["workers"]
    return found


def busy(resident: Resident) -> set[int]:
    """Return the process ids of the workers that have a unit."""
    return {worker["pid"] for worker in workers(resident) if worker["unit"]}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["verification", "reference"])
def test_a_small_call_goes_past_a_long_unit(attacked: tuple[Resident, list[str | None]], kind: str) -> None:
    """However long the unit of another connection takes, and however many of its calls wait, a small call is answered.

    The unit lasts until the small call has been answered: its process is stopped meanwhile.
    """
    resident, (attacker, other) = attacked
    inputs, wrong = ATTACK.floats(), np.ones(ATTACK.output_shape, np.float32)

    def attack() -> object:
        with convgrad.Client(resident.url, api_key=attacker) as client:
            if kind == "verification":
                return client.verify(ATTACK.op, inputs, wrong, ATTACK.attributes()).passed
            return client.run(ATTACK.op, inputs, ATTACK.attributes(), reference=True)

    with (
        ThreadPoolExecutor(3) as pool,
        convgrad.Client(resident.url, api_key=other) as client,
        Frozen({worker["pid"] for worker in workers(resident)}) as frozen,
    ):
        attacks = [pool.submit(attack) for _ in range(3)]
        resident.until(lambda: resident.service.engine.snapshot()["jobs"] == 3)
        assert len(busy(resident)) == 1  # the spare worker takes no long units
        stopped = busy(resident)
        spare = Frozen(frozen.pids - stopped)
        frozen.pids = stopped
        spare.__exit__()
        for _ in range(5):
            assert np.array_equal(client.run(TINY.op, TINY.inputs(), TINY.attributes()), TINY.expected(TINY.inputs()))
        assert busy(resident) == stopped
        assert not any(each.done() for each in attacks)
        frozen.__exit__()
        for each in attacks:
            assert each.result() is False or kind == "reference"
