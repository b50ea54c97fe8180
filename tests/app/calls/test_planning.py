"""From a resolved operation to a plan within the limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest

from app.settings import Settings
from app.telemetry.context import RequestContext
from convgrad import TooLarge
from engine import prepare
from engine.options import Options
from engine.planning import (
    Computation,
    Prepared,
    call_bytes,
    check_limits,
    is_planned_at_once,
    plan_call,
    problem_of,
    verification_cost,
    work_of_taps,
    work_of_verification,
)
from kernels.cache import CACHE
from schemas.ops import ResolvedOp, TensorMeta, resolve
from tests.app.resident import Resident
from tests.app.samples import SMALL
from tests.problems import Case, random_case, real_layers

LONG = Case(src_spatial=(1 << 17,), dst_spatial=(1,), kernel=(1 << 17,))


def resolved(case: Case, outputs: tuple[str, ...] = ()) -> ResolvedOp:
    """Return a case resolved as by an API."""
    inputs = {name: TensorMeta(case.dtype, shape) for name, shape in case.input_shapes.items()}
    return resolve(case.op, case.attributes(), inputs, outputs=outputs)


def test_shapes_and_work_agree_on_both_sides() -> None:
    """For random problems the kernels' descriptor has the same shapes and work as the schemas found."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        op = resolved(random_case(rng))
        problem = problem_of(op)
        assert problem.input_shapes == tuple(spec.shape for spec in op.inputs)
        assert problem.output_shape == op.output.shape
        assert problem.macs == op.macs


@pytest.mark.parametrize("name", ["work_limit", "memory_limit"])
def test_each_limit_refuses(name: str) -> None:
    """A limit one below what the call needs rejects it, and the error has the reason, both numbers and the place."""
    op = resolved(SMALL)
    need = {"work_limit": op.macs, "memory_limit": call_bytes(op)}[name]
    check_limits(op, Settings().model_copy(update={name: need}).limits)
    with pytest.raises(TooLarge) as caught:
        check_limits(op, Settings().model_copy(update={name: need - 1}).limits)
    reason, loc = name.removesuffix("_limit"), ["inputs", "diff_dst"]
    assert caught.value.data == {"reason": reason, "limit": need - 1, "value": need, "loc": loc}


@pytest.mark.parametrize(
    ("kernel", "channels"), [((1 << 18,), 1), ((1 << 9, 1 << 9), 1), ((1,), 1 << 22)], ids=["1D", "2D", "channels"]
)
def test_a_filter_whose_plan_would_be_huge_is_refused(kernel: tuple[int, ...], channels: int) -> None:
    """A short request can't make the service create tables of gigabytes."""
    ones = (1,) * len(kernel)
    op = resolved(Case(src_channels=channels, src_spatial=kernel, dst_spatial=ones, kernel=kernel))
    with pytest.raises(TooLarge) as caught:
        check_limits(op, Settings().limits)
    assert caught.value.data["reason"] == "plan"
    assert caught.value.data["value"] > caught.value.data["limit"]


def test_every_output_is_checked() -> None:
    """A plan is limited, and made apart from the event loop, whichever output is named first."""
    many = Case(op="ConvolutionBackwardWeights", src_spatial=(1 << 18,), dst_spatial=(1,), kernel=(1 << 18,))
    for outputs in (("diff_bias", "diff_weights"), ("diff_weights", "diff_bias")):
        op = resolved(many, outputs=outputs)
        with pytest.raises(TooLarge, match=r"the filter has \d+ taps, but"):
            check_limits(op, Settings().limits)
        assert not is_planned_at_once(op)


def test_the_reference_kernel_has_a_limit_of_units() -> None:
    """A filter that other kernels plan at once would need a unit per tap there."""
    op = resolved(Case(src_spatial=(1 << 15,), dst_spatial=(1,), kernel=(1 << 15,)))
    assert len(plan_call(op, Settings().limits)[0].plan.units) < 64
    with pytest.raises(TooLarge) as caught:
        plan_call(op, Settings().limits, reference=True)
    loc = ["attributes", "weights_shape"]
    assert caught.value.data == {"reason": "plan", "limit": 1 << 14, "value": 1 << 15, "loc": loc}
    assert caught.value.message.endswith(": weights_shape is (1, 1, 32768)")


@pytest.mark.parametrize("fast", [False, True])
def test_taps_are_work_of_a_verification(fast: bool) -> None:
    """A verification of many taps with little to sum exceeds the limit of work that its multiply-adds don't reach."""
    op = resolved(Case(n=64, src_spatial=(64, 64), dst_spatial=(1, 1), kernel=(64, 64)))
    assert work_of_verification(op, fast=fast) > 64 * 64 * 64 * 100_000 > 10_000 * op.macs
    settings = Settings(work_limit=1_000_000_000).limits
    assert not verification_cost(op, settings)["allowed"]
    work, taps = work_of_verification(op, fast=fast), work_of_taps(op)
    with pytest.raises(TooLarge) as caught:
        check_limits(replace(op, macs=work), settings, taps)
    loc = ["attributes", "weights_shape"]
    assert caught.value.data == {"reason": "work", "limit": 1_000_000_000, "value": work, "loc": loc}
    assert f"needs {work} multiply-adds, {taps} of them for the overhead of its" in caught.value.message


def test_a_plan_is_described() -> None:
    """A plan's description has its kernel, work, units and tiles."""
    op = resolved(SMALL)
    found = plan_call(op, Settings(workers=2).limits)
    said, plan = Prepared(op, found, Options(), {}).describe(), found[0].plan
    assert said["kernel"] == plan.kernel
    assert said["units"] == len(plan.units) >= said["tiles"] > 0


def test_usual_shapes_are_planned_at_once() -> None:
    """A real layer is planned without changing threads; long filters or many channels, positions or units are not."""
    assert all(is_planned_at_once(resolved(case)) for case in (SMALL, *real_layers()))
    one, far = (1,), 1 << 24
    for case in (
        LONG,
        Case(src_channels=far // 4, src_spatial=one, dst_spatial=one, kernel=one),
        Case(n=far, src_spatial=one, dst_spatial=one, kernel=one),
        Case(src_spatial=(far,), dst_spatial=(far,), kernel=one),
        Case(op="ConvTranspose", src_spatial=(2, 2), dst_spatial=(32, 32), kernel=(1, 1), strides=(31, 31)),
    ):
        assert not is_planned_at_once(resolved(case)), case
    many = resolved(Case(n=1000, src_spatial=one, dst_spatial=one, kernel=one))
    assert is_planned_at_once(many)
    assert not is_planned_at_once(many, reference=True)


def shapes(case: Case, **options: Any) -> dict[str, Any]:
    """Return a call whose tensors are only shapes."""
    inputs: dict[str, Any] = {
        name: {"dtype": case.dtype, "shape": list(shape)} for name, shape in case.input_shapes.items()
    }
    if not case.forward:
        inputs["weights_shape"] = list(case.weights_shape)
    return {"attributes": case.attributes(), "inputs": inputs, "options": options}


def validate(http: httpx.Client, case: Case, **options: Any) -> httpx.Response:
    """Validate a call over REST."""
    return http.post(f"/v1/ops/{case.op}/validate", json=shapes(case, **options))


def validations(count: int) -> list[dict[str, Any]]:
    """Return a batch of JSON-RPC validation requests."""
    params = {"op": LONG.op, **shapes(LONG)}
    return [{"jsonrpc": "2.0", "id": i, "method": "ops.validate", "params": params} for i in range(count)]


class Slow:
    """Planning that waits for the test's signal; records the threads that plan and how many plan at the same time.

    `pool` runs callers in parallel with the test.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(8)
        self.go = threading.Event()
        self.threads: list[str] = []
        self.most = 0
        self._now = 0

    def plan_call(self, *arguments: Any) -> tuple[Computation, ...]:
        """Replace `plan_call`."""
        self.threads.append(threading.current_thread().name)
        self._now += 1
        self.most = max(self.most, self._now)
        assert self.go.wait(30)
        self._now -= 1
        return plan_call(*arguments)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Make planning wait, until the end of the test at the latest."""
    slow = Slow()
    CACHE.clear()  # an earlier test may have planned the call
    monkeypatch.setattr(prepare, "plan_call", slow.plan_call)
    with slow.pool:
        yield slow
        slow.go.set()


def test_others_are_answered_while_a_long_plan_is_made(tight: Resident, tight_http: httpx.Client, slow: Slow) -> None:
    """Unusual shapes are planned off the event loop, one at a time; each occupies a place in the queue meanwhile."""
    two = [slow.pool.submit(validate, tight_http, LONG) for _ in range(2)]
    tight.until(lambda: tight.service.admission._calls.total() == 2)
    tight.until(lambda: bool(slow.threads))
    assert tight_http.get("/healthz").status_code == 200
    refused = validate(tight_http, SMALL)
    assert (refused.status_code, refused.json()["reason"]) == (503, "queue")
    assert len(slow.threads) == 1
    slow.go.set()
    assert [each.result().status_code for each in two] == [200, 200]
    assert slow.most == 1
    assert all(name.startswith("convgrad-plan") for name in slow.threads)
    assert tight.service.admission._calls.total() == 0
    validate(tight_http, SMALL)
    assert not slow.threads[-1].startswith("convgrad-plan")


def test_a_deadline_ends_waiting_for_a_plan(tight: Resident, tight_http: httpx.Client, slow: Slow) -> None:
    """Waiting for a plan, one's own or another's, ends at the deadline with an error and frees the place."""
    first = slow.pool.submit(validate, tight_http, LONG)
    tight.until(lambda: bool(slow.threads))
    assert validate(tight_http, LONG, deadline_ms=20).status_code == 504
    assert len(slow.threads) == 1
    slow.go.set()
    assert first.result().status_code == 200
    assert tight.service.admission._calls.total() == 0
    assert validate(tight_http, LONG).status_code == 200
    assert len(slow.threads) == 1, "what was given up is not planned, and the first plan is remembered"


@pytest.mark.parametrize("keys", [True, False])
def test_a_long_plan_waits_for_one_of_each_client(tight: Resident, keys: bool) -> None:
    """The plans of one key, or connection, are made one after another, and that of another one after the first."""
    order, go = list[str](), threading.Event()

    def make(name: str) -> None:
        assert go.wait(30)
        order.append(name)

    async def ask(name: str, client: int) -> None:
        context = RequestContext("test", connection=client)
        if keys:
            context = RequestContext("test", key=f"key{client}")
        await tight.service.plan_in_thread(partial(make, name), context)

    async def scenario() -> None:
        asked = [asyncio.create_task(ask(name, int(name[0]))) for name in ("1a", "1b", "1c", "2a")]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*asked)

    tight.run(scenario())
    assert order == ["1a", "2a", "1b", "1c"]


def test_the_spare_worker_is_for_short_units() -> None:
    """Units of compiled kernels are short but for unusual shapes, those of the reference if the whole call is."""
    layer = Case(n=8, src_channels=16, dst_channels=32, src_spatial=(28, 28), dst_spatial=(26, 26), kernel=(3, 3))
    taps = Case(
        src_spatial=(30_000,), dst_spatial=(30_000,), kernel=(30_001,), pads_begin=(15_000,), pads_end=(15_000,)
    )
    images = Case(n=1000, src_spatial=(1, 1, 1), dst_spatial=(1, 1, 1), kernel=(15, 15, 15), pads_begin=(7, 7, 7),
                  pads_end=(7, 7, 7))  # fmt: skip
    for case, reference, short in (
        (SMALL, False, True), (SMALL, True, True), (layer, False, True), (replace(layer, n=64), True, False),
        (taps, False, False), (images, True, False),
    ):  # fmt: skip
        (found,) = plan_call(resolved(case), Settings(workers=2).limits, reference)
        assert found.short is short, (case, reference)


def test_validations_are_admitted_like_calls(tight: Resident, tight_http: httpx.Client) -> None:
    """With a full queue they are rejected over REST and JSON-RPC, each of a batch; with room they are answered."""

    async def fill(stack: ExitStack) -> None:
        for _ in range(tight.service.settings.queue_length):
            stack.enter_context(tight.service.admission.call(RequestContext("test", address="127.0.0.1")))

    async def clear(stack: ExitStack) -> None:
        stack.close()

    # over an open connection: a new one would be rejected by its first bytes
    assert validate(tight_http, SMALL).status_code == 200
    stack = ExitStack()
    tight.run(fill(stack))
    try:
        refused = validate(tight_http, SMALL)
        assert (refused.status_code, refused.json()["reason"]) == (503, "queue")
        assert refused.headers["retry-after"] == "1"
        answers = tight_http.post("/rpc", json=validations(3)).json()
        assert [(each["id"], each["error"]["code"]) for each in answers] == [(0, -32000), (1, -32000), (2, -32000)]
    finally:
        tight.run(clear(stack))
    assert validate(tight_http, SMALL).status_code == 200
    answers = tight_http.post("/rpc", json=validations(2)).json()
    assert [each["result"]["plan"]["units"] for each in answers] == [1, 1]


def test_no_validation_while_draining(
    tight: Resident, tight_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is shutting down rejects validations like calls."""
    tight_http.get("/healthz")
    monkeypatch.setattr(tight.service, "admitting", False)
    assert validate(tight_http, SMALL).status_code == 503
    (answer,) = tight_http.post("/rpc", json=validations(1)).json()
    assert answer["error"]["code"] == -32006
