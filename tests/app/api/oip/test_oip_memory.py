"""Shared memory through the `/v2` API, with tritonclient's own utilities and against hostile clients."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from app.api.oip.infer import OipState
from app.api.oip.request import MemoryRange
from convgrad._errors import InvalidParams
from tests.app import oip
from tests.app.resident import Resident, resident_service
from tests.app.samples import DTYPES, SMALL, same_bits
from tests.problems import OPS, Case, random_case

INPUTS = SMALL.inputs()
KEYS = ["", "/", "..", "/..", "a/b", "/../etc/passwd", "/etc/passwd", ".hidden", "a\0b", "sem.a", "x" * 300, "a b"]


@pytest.fixture(scope="module")
def sharing() -> Iterator[Resident]:
    """A service in this process that allows shared memory, with little memory of its own."""
    with resident_service(workers=1, oip_shared_memory=True, memory_limit=40 << 20) as resident:
        yield resident


@pytest.fixture
def client(sharing: Resident) -> Iterator[Any]:
    """Tritonclient's own client, with no region left from another test."""
    with triton.InferenceServerClient(sharing.url.removeprefix("http://")) as client:
        client.unregister_system_shared_memory()
        yield client


@pytest.fixture
def http(sharing: Resident) -> Iterator[httpx.Client]:
    """A plain HTTP client for that service."""
    with httpx.Client(base_url=sharing.url, timeout=60.0) as client:
        yield client


@contextmanager
def region(client: Any, size: int, *, name: str = "", offset: int = 0) -> Iterator[tuple[str, Any]]:
    """Create shared memory with tritonclient's utilities and register it from an offset; yields name and handle."""
    name = name or f"region-{uuid.uuid4().hex[:8]}"
    key = f"/convgrad-test-{uuid.uuid4().hex[:8]}"
    handle = shm.create_shared_memory_region(name, key, size + offset, create_only=True)
    try:
        client.register_system_shared_memory(name, key, size, offset)
        yield name, handle
        client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(handle)


def shared_infer(
    client: Any, case: Case, inputs: dict[str, Any], *, name: str = "", offset: int = 0, shape_too: bool = False
) -> Any:
    """Compute a case with every tensor in one region, its output after its inputs; return the response."""
    attributes = case.attributes()
    arrays = dict(inputs)
    if shape_too and case.shape_name is not None:
        arrays[case.shape_name] = np.array(attributes.pop(case.shape_name), np.int64)
    expected = case.expected(inputs)
    total = sum(array.nbytes for array in arrays.values()) + expected.nbytes
    with region(client, max(1, total), name=name, offset=offset) as (name, handle):
        tensors, at = [], 0
        for key, array in arrays.items():
            shm.set_shared_memory_region(handle, [array], offset + at)
            datatype = "INT64" if key == case.shape_name else oip.OIP[case.dtype]
            made = triton.InferInput(key, list(array.shape), datatype)
            made.set_shared_memory(name, array.nbytes, at)
            tensors.append(made)
            at += array.nbytes
        output = triton.InferRequestedOutput(case.output_name)
        output.set_shared_memory(name, expected.nbytes, at)
        result = client.infer(case.op, tensors, outputs=[output], parameters=attributes)
        got = shm.get_contents_as_numpy(handle, DTYPES[case.dtype], expected.shape, offset + at).copy()
    assert same_bits(got, expected), case
    return result.get_response()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_inputs_and_outputs_in_shared_memory(client: Any, dtype: str) -> None:
    """A client with its tensors in shared memory, small or of megabytes, sends only names, and finds the result there.

    The larger ones are copied off the event loop.
    """
    large = replace(SMALL, n=40, src_spatial=(60, 50), dst_spatial=(119, 100))
    for case in (replace(SMALL, dtype=dtype), replace(large, dtype=dtype)):
        (output,) = shared_infer(client, case, case.inputs())["outputs"]
        assert set(output) == {"name", "datatype", "shape"}


def test_random_calls_in_shared_memory(client: Any) -> None:
    """Every operation works, also with a region that begins inside its object and with the weights' shape in it."""
    rng = np.random.default_rng(29)
    seen = set()
    for number in range(40):
        case = random_case(rng)
        seen.add(case.op)
        shared_infer(client, case, case.inputs(), offset=64 * (number % 3), shape_too=number % 2 == 0)
    assert seen == set(OPS)


@pytest.mark.parametrize("shape_too", [False, True])
def test_an_equal_request_reads_the_region_again(client: Any, shape_too: bool) -> None:
    """The same request after the region's name was reused reads the new memory; once that is gone, it is rejected."""
    for factor in (1, -3):
        inputs = {name: factor * array for name, array in INPUTS.items()}
        shared_infer(client, SMALL, inputs, name="again", shape_too=shape_too)
    sizes = {name: array.nbytes for name, array in INPUTS.items()}
    output = triton.InferRequestedOutput("diff_weights")
    output.set_shared_memory("elsewhere", 4 * math.prod(SMALL.weights_shape))

    def call(*outputs: Any) -> Any:
        tensors = [triton.InferInput(name, list(array.shape), "FP32") for name, array in INPUTS.items()]
        for at, tensor in enumerate(tensors):
            tensor.set_shared_memory("again", sizes[tensor.name()], at)
        return client.infer(SMALL.op, tensors, outputs=outputs or None, parameters=SMALL.attributes())

    with region(client, sum(sizes.values()), name="again"):
        call()
        with pytest.raises(InferenceServerException, match="no shared memory region elsewhere"):
            call(output)
        with region(client, 1 << 16, name="elsewhere"):
            call(output)
        with pytest.raises(InferenceServerException, match="no shared memory region elsewhere"):
            call(output)
    with pytest.raises(InferenceServerException, match="no shared memory region again"):
        call()


def test_a_shape_in_shared_memory_is_read_every_time(client: Any) -> None:
    """The weights' shape in shared memory may change between two equal requests."""
    src, diff_dst = INPUTS["src"], INPUTS["diff_dst"]
    attributes = {name: value for name, value in SMALL.attributes().items() if name != "weights_shape"}
    shape = np.array(SMALL.weights_shape, np.int64)
    with region(client, shape.nbytes) as (name, handle):
        stated = triton.InferInput("weights_shape", [len(shape)], "INT64")
        stated.set_shared_memory(name, shape.nbytes)
        tensors = [oip.tensor("src", src, "FP32"), oip.tensor("diff_dst", diff_dst, "FP32"), stated]
        for _ in range(2):
            shm.set_shared_memory_region(handle, [shape])
            result = client.infer(SMALL.op, tensors, parameters=attributes)
            assert same_bits(result.as_numpy("diff_weights"), SMALL.expected(INPUTS))
            shm.set_shared_memory_region(handle, [shape + 2])
            with pytest.raises(InferenceServerException, match="must have size"):
                client.infer(SMALL.op, tensors, parameters=attributes)


def test_mixed_places(client: Any) -> None:
    """One input may be in shared memory, the other in the body, and the output in the reply."""
    src, diff_dst = INPUTS["src"], INPUTS["diff_dst"]
    with region(client, src.nbytes) as (name, handle):
        shm.set_shared_memory_region(handle, [src])
        shared = triton.InferInput("src", list(src.shape), "FP32")
        shared.set_shared_memory(name, src.nbytes)
        for binary in (True, False):
            tensors = [shared, oip.tensor("diff_dst", diff_dst, "FP32", binary=binary)]
            result = client.infer(SMALL.op, tensors, parameters=SMALL.attributes())
            assert same_bits(result.as_numpy("diff_weights"), SMALL.expected(INPUTS))


def test_status_and_unregister(client: Any) -> None:
    """Regions are listed while they are registered; unregistering an unknown one is not an error."""
    assert "system_shared_memory" in client.get_server_metadata()["extensions"]
    with region(client, 100, name="one", offset=8), region(client, 50, name="two"):
        (one,) = client.get_system_shared_memory_status("one")
        assert (one["name"], one["offset"], one["byte_size"]) == ("one", 8, 100)
        assert {entry["name"] for entry in client.get_system_shared_memory_status()} == {"one", "two"}
        with pytest.raises(InferenceServerException, match="already registered"):
            client.register_system_shared_memory("one", one["key"], 10)
    assert client.get_system_shared_memory_status() == []
    client.unregister_system_shared_memory("one")
    with pytest.raises(InferenceServerException, match="no shared memory region one") as caught:
        client.get_system_shared_memory_status("one")
    assert caught.value.status() == "404"


@pytest.mark.parametrize("key", [*KEYS, 7, None])
def test_keys_stay_in_their_folder(http: httpx.Client, key: object) -> None:
    """A key is the plain name of a shared memory object, never a path to anything else."""
    response = http.post("/v2/systemsharedmemory/region/r/register", json={"key": key, "offset": 0, "byte_size": 1})
    assert "key must be" in oip.error(response, 400)


@pytest.mark.parametrize("name", ["%20", "a%20b", "x" * 129, "%00", "é", "a%0Ab"])
def test_names_are_plain(http: httpx.Client, name: str) -> None:
    """A region's name is short and plain."""
    response = http.post(f"/v2/systemsharedmemory/region/{name}/register", json={"key": "a", "byte_size": 1})
    assert "name" in oip.error(response, 400)


def test_memory_of_others_is_refused(http: httpx.Client) -> None:
    """Links, folders, pipes, missing objects and other users' memory are rejected."""
    folder, made = Path("/dev/shm"), f"convgrad-test-{uuid.uuid4().hex[:8]}"

    def register() -> str:
        response = http.post("/v2/systemsharedmemory/region/r/register", json={"key": made, "byte_size": 4})
        return oip.error(response, 400)

    assert "can't be opened" in register()
    path = folder / made
    path.symlink_to("/etc/hostname")
    assert "can't be opened" in register()
    path.unlink()
    path.mkdir()
    assert "can't be opened" in register()
    path.rmdir()
    os.mkfifo(path)
    assert "not shared memory" in register()
    path.unlink()
    path.write_bytes(b"four")
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        assert "of the user" in register()
    path.unlink()


@pytest.mark.parametrize(
    "given",
    [
        *({"offset": offset, "byte_size": 1} for offset in (-1, 0.5, True, 1 << 20)),
        *({"offset": 0, "byte_size": size} for size in (0, -5, "1")),
        {"offset": 0},
        {"offset": 2**63, "byte_size": 2**63},
        {"offset": 2**62, "byte_size": 2**62},
    ],
)
def test_bounds_of_a_region(http: httpx.Client, given: dict[str, Any]) -> None:
    """A region must lie inside its object."""
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        response = http.post("/v2/systemsharedmemory/region/r/register", json={"key": memory.name, **given})
        oip.error(response, 400)
    finally:
        memory.close()
        memory.unlink()


def test_bounds_of_a_tensor(client: Any) -> None:
    """A tensor must lie inside its region and be as long as its shape says, and an output must fit its place."""
    src, sent = INPUTS["src"], oip.triton_inputs(SMALL, INPUTS)
    with region(client, src.nbytes) as (name, handle):
        shm.set_shared_memory_region(handle, [src])
        for place, words in (
            ((name, src.nbytes, 4), "exceed the"),
            ((name, src.nbytes - 4, 0), "shared_memory_byte_size of src is 636"),
            ((name, src.nbytes, -4), "of at least 0"),
            (("nobody", src.nbytes, 0), "no shared memory region nobody"),
        ):
            shared = triton.InferInput("src", list(src.shape), "FP32")
            shared.set_shared_memory(*place)
            with pytest.raises(InferenceServerException, match=words):
                client.infer(SMALL.op, [shared, sent[1]], parameters=SMALL.attributes())
        for place, words in (
            ((name, 4, 0), "shared_memory_byte_size of diff_weights is 4"),
            ((name, 4096, 0), "exceed the"),
            (("nobody", 4096, 0), "no shared memory region nobody"),
        ):
            output = triton.InferRequestedOutput("diff_weights")
            output.set_shared_memory(*place)
            with pytest.raises(InferenceServerException, match=words):
                client.infer(SMALL.op, sent, outputs=[output], parameters=SMALL.attributes())


def test_truncated_memory_is_an_error(client: Any, sharing: Resident) -> None:
    """If a client truncates its memory after registering it, it gets an error, and others are not affected."""
    src = INPUTS["src"]
    inputs = oip.triton_inputs(SMALL, INPUTS)
    with region(client, 1 << 20) as (name, _):
        key = client.get_system_shared_memory_status(name)[0]["key"]
        os.truncate(Path("/dev/shm") / key.removeprefix("/"), 16)
        shared = triton.InferInput("src", list(src.shape), "FP32")
        shared.set_shared_memory(name, src.nbytes)
        with pytest.raises(InferenceServerException, match="shorter than it was"):
            client.infer(SMALL.op, [shared, inputs[1]], parameters=SMALL.attributes())
        output = triton.InferRequestedOutput("diff_weights")
        output.set_shared_memory(name, 4096)
        with pytest.raises(InferenceServerException, match="shorter than it was"):
            client.infer(SMALL.op, inputs, outputs=[output], parameters=SMALL.attributes())
        os.truncate(Path("/dev/shm") / key.removeprefix("/"), 1 << 20)
    sharing.until(lambda: sharing.service.segments.stats().used == 0)
    assert same_bits(oip.infer(client, SMALL, INPUTS), SMALL.expected(INPUTS))


def test_regions_close_their_descriptors(client: Any) -> None:
    """Registering and unregistering many regions leaves no descriptor open."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts, not paths
    for _ in range(50):
        with region(client, 64):
            pass
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208


def test_a_call_holds_its_tensors_once(client: Any) -> None:
    """Two inputs of 16 MB fit a service that has 40 MB for all tensors, from the body and from a region."""
    case = Case(
        dtype="f16", src_channels=16, dst_channels=16, src_spatial=(512, 512), dst_spatial=(512, 512), kernel=(1, 1)
    )
    inputs = case.inputs()
    assert same_bits(oip.infer(client, case, inputs), case.expected(inputs))
    shared_infer(client, case, inputs)


def test_a_region_belongs_to_the_key_that_registered_it() -> None:
    """A key can't see, use or unregister another key's regions; each key has its own names."""
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        state = OipState(shared_memory=True)
        ours, theirs = state.regions("ours"), state.regions("theirs")
        ours.register("r", memory.name, 0, 100)
        theirs.register("r", memory.name, 100, 50)
        theirs.clear()
        assert [region.byte_size for region in state.regions("ours").values()] == [100]
        with pytest.raises(InvalidParams, match="no shared memory region r"):
            theirs.find(MemoryRange("r", 0, 10))
        assert ours.find(MemoryRange("r", 90, 10)).name == "r"
    finally:
        memory.close()
        memory.unlink()
