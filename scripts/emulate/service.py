"""Compare an emulated service with the kernels on this machine: ``python scripts/emulate/service.py COMMAND...``.

COMMAND starts the service; ``--port N`` is appended to it. Each operation is computed in each dtype on small
integers, where every sum is exact, and the bits are compared with those of this processor.
"""

from __future__ import annotations

import re
import subprocess
import sys

from convgrad import Client
from kernels import compute
from tests import naive
from tests.kernels.harness import problem_of, stored
from tests.problems import OPS, Case

START_S = 1800.0


def cases() -> list[Case]:
    """Yield one strided call for each operation and dtype."""
    gradient = Case(
        n=2, src_channels=24, dst_channels=20, src_spatial=(13, 12), dst_spatial=(7, 6), kernel=(3, 3), strides=(2, 2),
        pads_begin=(1, 1), pads_end=(1, 1),
    )  # fmt: skip
    mirrored = gradient.mirrored()
    each = {case.op: case for case in (gradient, mirrored)}
    each["ConvTranspose"] = Case(**{**vars(mirrored), "op": "ConvTranspose"})
    return [Case(**{**vars(each[op]), "dtype": dtype}) for op in OPS for dtype in ("f32", "f16", "bf16")]


def differs(client: Client, case: Case) -> bool:
    """Compute one call on both; return whether any bit differs."""
    inputs = case.inputs()
    shape = {} if case.forward else {"weights_shape": list(case.weights_shape)}
    attributes = {key: value for key, value in case.attributes().items() if key != "weights_shape"}
    there = client.run(case.op, {**inputs, **shape}, attributes)
    here = compute(problem_of(case), *map(stored, inputs.values())).view(naive.DTYPES[case.dtype])
    same = stored(there).tobytes() == here.tobytes()
    sys.stdout.write(f"{case.op} {case.dtype}: {'the same bits' if same else 'OTHER BITS'}\n")
    return not same


def main(command: list[str]) -> int:
    """Start the service, compare, and stop it."""
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 -- our own
        assert process.stderr is not None
        try:
            url, log = "", []
            for line in process.stderr:
                log.append(line)
                url = found[1] if (found := re.search(r"listening on ([^\s\"]+)", line)) else url
                if "ready after" in line:
                    break
            else:
                sys.stderr.write("the service did not start:\n" + "".join(log[-20:]))
                return 1
            with Client(url, timeout=START_S) as client:
                return int(sum(differs(client, case) for case in cases()) > 0)
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
