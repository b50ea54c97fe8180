"""The page of error messages: each of them is provoked here, and none is on the page that isn't."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import convgrad
from tests.live import LiveService, running_service

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
OP = "ConvolutionBackwardWeights"
PLAIN: dict[str, Any] = {
    "strides": (1,),
    "dilations": (1,),
    "pads_begin": (0,),
    "pads_end": (0,),
    "data_format": "NCX",
    "weights_format": "OIX",
    "weights_shape": (1, 1, 2),
}
SAME: dict[str, Any] = {
    "strides": (1, 1),
    "dilations": (1, 1),
    "auto_pad": "same_upper",
    "data_format": "NCX",
    "weights_format": "OIX",
}
JSON = {"content-type": "application/json"}


def rows() -> list[list[str]]:
    """Return the message and the advice of each row."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    """Return a tensor of ones."""
    return np.ones(shape, dtype)


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """The address of a service for one call at a time, of at most a mebibyte."""
    with running_service("--queue-length", "1", "--body-limit", "1MiB", "--workers", "1") as service:
        yield service.url


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    """The address of a service that requires a key."""
    with running_service("--keys", "team-a sha256:" + "0" * 64, "--workers", "1") as service:
        yield service.url


class Provoker:
    """Makes the mistakes; each method returns the message that it led to."""

    def __init__(self, url: str, folder: Path, fixture: Callable[[str], str]) -> None:
        self.url = url
        self.folder = folder
        self.fixture = fixture

    def call(self, url: str = "", *, src: Any = None, diff_dst: Any = None, op: str = OP, **changes: Any) -> str:
        """Make the plain call with changes, of which None removes an attribute."""
        attributes = {name: value for name, value in {**PLAIN, **changes}.items() if value is not None}
        inputs = {"src": ones(1, 1, 3) if src is None else src, "diff_dst": ones(1, 1, 2)}
        if diff_dst is not None:
            inputs["diff_dst"] = diff_dst

        def act() -> None:
            with convgrad.Client(url or self.url, retry=None) as client:
                client.run(op, inputs, attributes)

        return said(act)

    def post(self, content: bytes = b"{}", **headers: str) -> str:
        """Send a request by plain HTTP."""
        given = {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
        reply = httpx.post(f"{self.url}/v1/ops/{OP}", content=content, headers=given)
        return str(reply.json()["detail"])

    def command(self, *arguments: str, code: str = "", **environment: str) -> str:
        """Run the command, or some Python; return what it prints."""
        command = [sys.executable, *(["-c", code] if code else ["-m", "convgrad"]), *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CONVGRAD_URL": self.url, **environment}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr

    def file(self, array: Any, cut: int = 0) -> str:
        """Write a .npy file, without its last bytes; return its path."""
        path = self.folder / "tensor.npy"
        np.save(path, array)
        path.write_bytes(path.read_bytes()[: -cut or None])
        return str(path)

    def setup_without_python(self) -> str:
        """Run scripts/setup where there is no Python."""
        tools = self.folder / "bin"
        tools.mkdir()
        for name in ("dirname", "cksum"):
            (tools / name).symlink_to(str(shutil.which(name)))
        env = {"PATH": str(tools), "CONVGRAD_VENV": str(self.folder / "venv")}
        command = [str(shutil.which("bash")), str(ROOT / "scripts" / "setup")]
        return subprocess.run(command, env=env, capture_output=True, text=True).stderr

    def missing(self, package: str, *arguments: str) -> str:
        """Run the command where a package is not installed."""
        code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_module('convgrad', run_name='__main__')"
        return self.command(*arguments, code=code)

    def starting(self) -> str:
        """Call a service that has to compile its kernels first."""
        with running_service(wait=False, NUMBA_CACHE_DIR=str(self.folder)) as service:
            assert service.listens.wait(60)
            return self.call(service.url)

    def with_key(self, key: str | None) -> str:
        """Call a service that requires a key."""
        with convgrad.Client(self.fixture("locked"), api_key=key) as client:
            return said(client.operations)

    def busy(self) -> str:
        """Call a service whose only place is taken by a call of seconds."""
        large = ones(1, 64, 32, 32)
        attributes = {**SAME, "weights_shape": (64, 64, 41, 41)}
        with (
            convgrad.Client(self.fixture("small")) as client,
            client.stream(OP, {"src": large, "diff_dst": large}, attributes, reference=True) as stream,
        ):
            next(iter(stream))
            return self.call(self.fixture("small"))

    def large_body(self) -> str:
        """Send more than a service accepts."""
        return self.call(self.fixture("small"), src=ones(1, 1, 300_001), diff_dst=ones(1, 1, 300_000))

    def silent(self) -> str:
        """Call something that accepts connections and says nothing."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            with convgrad.Client(url, timeout=0.05, retry=None) as client:
                return said(client.operations)

    def deadline(self) -> str:
        """Ask for a result within a millisecond."""
        large = ones(8, 64, 64, 64)
        attributes = {**SAME, "weights_shape": (64, 64, 3, 3)}
        with convgrad.Client(self.url) as client:
            return said(lambda: client.run(OP, {"src": large, "diff_dst": large}, attributes, deadline=0.001))

    def too_much_work(self) -> str:
        """Check a call of 3e14 multiply-adds."""
        large = {"dtype": "f32", "shape": [512, 1024, 256, 256]}
        attributes = {**SAME, "weights_shape": (1024, 1024, 3, 3)}
        with convgrad.Client(self.url) as client:
            return said(lambda: client.validate(OP, {"src": large, "diff_dst": large}, attributes))

    def png(self) -> str:
        """Ask for a picture without matplotlib."""
        return self.missing("matplotlib", "verify", OP, "--result", "x.npy", "--png", "x.png")


def said(action: Callable[[], Any]) -> str:
    """Return the message of the error that an action ends with, and those of all broken rules."""
    with pytest.raises((convgrad.ConvgradError, ValueError)) as raised:
        action()
    return "\n".join([str(raised.value), *(fault["msg"] for fault in getattr(raised.value, "errors", []))])


PROVOKED: dict[str, Callable[[Provoker], str]] = {
    "convgrad needs Python 3.11 or newer": Provoker.setup_without_python,
    "the service needs": lambda p: p.missing("numba", "serve"),
    "Address already in use": lambda p: p.command("serve", "--port", p.url.rpartition(":")[2]),
    "--host:": lambda p: p.command("serve", "--host", "0.0.0.0", "--dry-run"),
    "--queue-length:": lambda p: p.command("serve", "--queue-length", "x", "--dry-run"),
    ".. is not a flag": lambda p: p.command("serve", "--wokers", "2"),
    "there is no key": lambda p: p.command("serve", "--keys", ";", "--dry-run"),
    ".. is not a setting": lambda p: p.command("serve", "--dry-run", CONVGRAD_QUEUE_LENGHT="3"),
    "CONVGRAD_TARGET:": lambda p: p.command("serve", "--dry-run", CONVGRAD_TARGET="pentium"),
    "can't connect": lambda p: p.call("http://127.0.0.1:9"),
    "url must begin": lambda p: p.call(p.url.removeprefix("http://")),
    "the service is starting": Provoker.starting,
    "this service requires an API key": lambda p: p.with_key(None),
    "this API key is not valid": lambda p: p.with_key("wrong"),
    "the name in the Host header": lambda p: p.post(host="example.org"),
    "pages of this origin": lambda p: p.post(origin="http://example.org"),
    ".. calls are being received": Provoker.busy,
    "the service did not answer in time": Provoker.silent,
    "the deadline passed": Provoker.deadline,
    "the call needs .. multiply-adds": Provoker.too_much_work,
    "the request body exceeds": Provoker.large_body,
    "the Content-Type must be": lambda p: p.post(content_type="application/x-www-form-urlencoded"),
    "the body is not JSON": lambda p: p.post(b"{attributes: {}}"),
    "there is no operation": lambda p: p.call(op="ConvBackwardWeights"),
    "src: float64 is computed only": lambda p: p.call(src=ones(1, 1, 3, dtype=np.float64)),
    "src: int32 is not computed": lambda p: p.call(src=ones(1, 1, 3, dtype=np.int32)),
    "diff_dst must be f32": lambda p: p.call(diff_dst=ones(1, 1, 2, dtype=np.float16)),
    "src: the dtype must be": lambda p: p.call(src=np.array(None)),
    "a .npy file of '<u2'": lambda p: p.call(src=p.file(ones(1, 1, 3, dtype=np.uint16))),
    "the descr of a .npy file": lambda p: p.call(src=p.file(np.array([{}]))),
    ".. must have .. bytes by its header": lambda p: p.call(src=p.file(ones(1, 1, 3), cut=2)),
    "pads_begin is required": lambda p: p.call(pads_begin=None),
    "weights_shape is required": lambda p: p.call(weights_shape=None),
    "weights_shape must be": lambda p: p.call(
        src=ones(1, 8, 3), diff_dst=ones(1, 7, 4), data_format=None, weights_format=None, weights_shape=(4, 3, 2)
    ),
    "diff_dst must have size": lambda p: p.call(diff_dst=ones(1, 1, 3)),
    "groups must divide": lambda p: p.call(groups=2),
    "stride is not an attribute": lambda p: p.call(stride=(1,)),
    "data_format must be": lambda p: p.call(data_format="NCHW"),
    "strides must be a list": lambda p: p.call(strides=1),
    "strides must have one value": lambda p: p.call(src=ones(1, 1, 3, 3), diff_dst=ones(1, 1, 2, 2)),
    "output_padding[0] must be": lambda p: p.call(
        op="ConvTransposeBackwardWeights", diff_dst=ones(1, 1, 5), weights_format="IOX", output_padding=(1,)
    ),
    "run needs .npy files": lambda p: p.command("run", OP, "--src", "f32:1,1,3"),
    "several outputs need": lambda p: p.command(
        "run", OP, "--outputs", "diff_weights,diff_bias", "--src", p.file(ones(1, 1, 3)), "-o", "x.npy"
    ),
    "--png needs": Provoker.png,
    "argument --attr": lambda p: p.command("run", OP, "--attr", "strides"),
}
"""What provokes each message, by the beginning of the message."""


def test_every_row_is_provoked() -> None:
    """Each message of the page begins as exactly one that is provoked, in the same order, and has its advice."""
    messages = [message.strip("`") for message, _ in rows()]
    assert len(messages) == len(PROVOKED)
    assert not [pair for pair in zip(messages, PROVOKED, strict=True) if not pair[0].startswith(pair[1])]
    assert all(advice.strip() for _, advice in rows())


@pytest.mark.heavy
@pytest.mark.parametrize("beginning", PROVOKED)
def test_the_message(service: LiveService, tmp_path: Path, request: pytest.FixtureRequest, beginning: str) -> None:
    """The mistake leads to the message as it is on the page; two dots stand for anything."""
    (message,) = (row[0].strip("`") for row in rows() if row[0].strip("`").startswith(beginning))
    pattern = ".*".join(map(re.escape, message.split("..")))
    found = PROVOKED[beginning](Provoker(service.url, tmp_path, request.getfixturevalue))
    assert re.search(pattern, found), found
