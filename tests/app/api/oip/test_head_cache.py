"""The cache of inference request heads."""

from __future__ import annotations

import json

import httpx
import numpy as np

from app.api.oip.head_cache import CachedHead, HeadCache
from app.api.oip.request import InferRequest, InputTensor, RequestedOutput
from app.settings import Settings
from convgrad._dtypes import DTYPES
from engine.options import parse_options
from engine.planning import Prepared, plan_call
from schemas.ops import resolve
from schemas.tensors import TensorMeta
from tests.app import oip
from tests.app.samples import SMALL, same_bits

F32, S64 = DTYPES["f32"], DTYPES["s64"]


def head(*sources: str) -> CachedHead:
    """Return a head with an input from each of these places."""
    inputs = [InputTensor(f"input{at}", F32, (1,), source) for at, source in enumerate(sources)]  # type: ignore[arg-type]
    return CachedHead(InferRequest(None, {}, {}, None, inputs, (RequestedOutput("dst", True),)), (), (), 0)


def test_the_least_recently_used_head_is_dropped() -> None:
    """However many different heads arrive, a bounded number is kept, and those in use are among them."""
    heads, mine = HeadCache(), head("binary")
    heads.keep("op", b"mine", mine)
    for number in range(1000):
        heads.keep("op", b"%d" % number, head("binary"))
        assert heads.find("op", b"mine") is mine
    assert sum(heads.find("op", b"%d" % number) is not None for number in range(1000)) < 256


def test_plans_are_counted() -> None:
    """HeadCache whose plans are large are dropped before the number of heads is reached."""
    attributes = {"strides": [1], "pads_begin": [0], "pads_end": [0], "dilations": [1], "weights_format": "OIX"}
    metas = {"src": TensorMeta("f32", (4096, 1, 512)), "weights": TensorMeta("f32", (1, 1, 1))}
    op = resolve("Convolution", attributes | {"data_format": "NCX"}, metas)
    options = parse_options({"reference": True})
    prepared = Prepared(op, plan_call(op, Settings(), reference=True), options, {})
    heads = HeadCache()
    for number in range(30):
        each = head("binary")
        each.remember(b"", prepared)
        heads.keep("op", b"%d" % number, each)
        assert heads.plan_bytes <= 32 << 20
    assert heads.find("op", b"29") is not None
    assert heads.find("op", b"0") is None


def test_a_head_belongs_to_its_model() -> None:
    """The same text for another model is a different call."""
    heads = HeadCache()
    heads.keep("op", b"text", head("binary"))
    assert heads.find("other", b"text") is None


def test_heads_with_numbers_are_not_cached() -> None:
    """A head that contains numbers is parsed every time."""
    heads = HeadCache()
    heads.keep("op", b"text", head("binary", "json"))
    assert heads.find("op", b"text") is None


def test_shapes_are_read_from_the_first_bytes_if_present() -> None:
    """The bytes of a shape are found after the tensors before it, but only when all of them have arrived."""
    shape = InputTensor("weights_shape", S64, (2,), "binary")
    found = CachedHead(head("binary").request, (), ((shape, 3),), 19)
    assert found.shape_bytes(memoryview(b"abc" + bytes(range(16)) + b"more")) == bytes(range(16))
    assert found.shape_bytes(memoryview(b"abc" + bytes(range(15)))) is None


def test_the_same_head_with_another_shape_is_another_call(tight_http: httpx.Client) -> None:
    """With the same head every weights_shape gets its own answer, also the second time, and a wrong one its error."""
    inputs, shape = SMALL.inputs(), list(SMALL.weights_shape)
    attributes = {name: value for name, value in SMALL.attributes().items() if name != "weights_shape"}
    described = oip.head(SMALL, inputs) | {"parameters": attributes}
    entry = {"name": "weights_shape", "shape": [len(shape)], "datatype": "INT64"}
    described["inputs"].append(entry | {"parameters": {"binary_data_size": 8 * len(shape)}})
    text = json.dumps(described | {"parameters": {**attributes, "binary_data_output": True}}).encode()

    def post(shape: list[int]) -> httpx.Response:
        content = b"".join([text, *(array.tobytes() for array in inputs.values()), np.array(shape, "<i8").tobytes()])
        return oip.post(tight_http, SMALL.op, content, {oip.HEAD_LENGTH: str(len(text))})

    wrong = [*shape[:-1], shape[-1] + 2]
    for _ in range(2):
        assert same_bits(oip.read(post(shape), "f32"), SMALL.expected(inputs))
        assert "diff_dst must have size" in oip.error(post(wrong), 400)
