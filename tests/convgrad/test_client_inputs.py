"""What the client takes from its caller and its environment: tensors of other libraries, deadlines, address and key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import Client
from tests.convgrad.server import SRC, Server, free_port


def test_the_environment_has_address_and_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments the client reads the variables that the command reads."""
    monkeypatch.setenv("CONVGRAD_URL", server.url)
    monkeypatch.setenv("CONVGRAD_API_KEY", "from-the-environment")
    with convgrad.Client() as client:
        client.run("Op", {"src": SRC})
    assert server.received[0].headers["authorization"] == "Bearer from-the-environment"


def test_no_connection_names_the_address() -> None:
    """The error says where nobody answered, without a password in the address."""
    port = free_port()
    with (
        convgrad.Client(f"http://user:secret@127.0.0.1:{port}", retry=None) as client,
        pytest.raises(
            convgrad.ConnectFailed, match=f"can't connect to the service at http://127.0.0.1:{port}"
        ) as caught,
    ):
        client.run("Op", {"src": SRC})
    assert str(caught.value).endswith("; start one with `convgrad serve`, or use convgrad.local()")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"text", "a .npy file must begin with"),
        (b"", "the file ends within its .npy header"),
        (b"\x93NUMPY\x09\x00", "the .npy format version must be"),
    ],
)
def test_a_file_of_another_format_is_named(
    client: Client, server: Server, tmp_path: Path, content: bytes, reason: str
) -> None:
    """The error names the file that is no .npy file."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(convgrad.ParseError, match=f"^{re.escape(f'{path}: {reason}')}"):
        client.run("Op", {"src": path})
    np.save(path.with_suffix(".npy"), np.ones(3, np.complex64))
    with pytest.raises(convgrad.Unsupported, match=r"^src: .*notes.npy: the descr"):
        client.run("Op", {"src": path.with_suffix(".npy")})
    assert not server.received


def test_lists_of_numbers(client: Client, server: Server) -> None:
    """A list is a float32 tensor, also one of integers; only shapes are lists in the request."""
    client.run_detailed("Op", {"src": SRC.tolist(), "bias": [1, 2], "weights_shape": [4, 3]})
    received = server.received[-1]
    np.testing.assert_array_equal(received.tensors["src"], SRC)
    assert received.tensors["src"].dtype == received.tensors["bias"].dtype == np.float32
    assert received.tensors["bias"].tolist() == [1, 2]
    assert received.tensors["weights_shape"].tolist() == [4, 3]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "an array, not NoneType"), (object(), "an array, not object"), ([[1], [2, 3]], "an array, not list"),
        (SRC.astype(np.int64), "int64 is not computed: convert it"), (SRC > 0, "the dtype must be one of"),
        (SRC.astype(np.longdouble), f"but is {np.dtype(np.longdouble)}: convert it, .*astype"),
        (SRC.astype(np.float64), "float64 is computed only with reference=True.*astype"),
    ],
)  # fmt: skip
def test_what_is_no_tensor(client: Client, server: Server, value: Any, message: str) -> None:
    """The error names the input and what it is; nothing is sent."""
    with pytest.raises(convgrad.Unsupported, match=f"^src: .*{message}"):
        client.run("Op", {"src": value})
    assert not server.received


def test_float64_is_sent_for_the_reference(client: Client, server: Server) -> None:
    """With `reference` a call takes float64 as it is."""
    sent = SRC.astype(np.float64) + 2.0**-40
    client.run_detailed("Op", {"src": sent}, reference=True)
    received = server.received[-1]
    assert received.document["inputs"][0]["datatype"] == "FP64"
    np.testing.assert_array_equal(received.tensors["src"], sent)


def test_tensors_of_pytorch(client: Client, server: Server) -> None:
    """A tensor of PyTorch is sent as it is: with gradients, as bfloat16, and with other strides."""
    torch = pytest.importorskip("torch")
    plain = torch.from_numpy(SRC.copy())
    for tensor, datatype in (
        (plain.clone().requires_grad_(), "FP32"), (plain.bfloat16(), "BF16"), (plain.half(), "FP16"),
        (plain.transpose(0, 1), "FP32"),
    ):  # fmt: skip
        client.run_detailed("Op", {"src": tensor})
        received = server.received[-1]
        assert received.document["inputs"][0]["datatype"] == datatype
        np.testing.assert_array_equal(received.tensors["src"].astype(np.float32), tensor.detach().float().numpy())
