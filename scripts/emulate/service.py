"""Compare an emulated service with the kernels on this machine: ``python scripts/emulate/service.py COMMAND...``.

COMMAND starts the service; ``--port N`` is appended to it. Each operation is computed in each dtype on small
integers, where every sum is exact, and the bits are compared with those of this processor.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

from convgrad import Client
from kernels import compute
from tests import naive
from tests.kernels.harness import problem_of, stored
from tests.problems import OPS, Case

START_S = 1800.0


def cases() -> list[Case]:
    """Return one call for each operation and dtype, of strided layers."""
    plain = Case(
        n=2, src_channels=24, dst_channels=20, src_spatial=(13, 12), dst_spatial=(7, 6), kernel=(3, 3), strides=(2, 2),
        pads_begin=(1, 1), pads_end=(1, 1),
    )  # fmt: skip
    transposed = plain.mirrored()
    bias = Case(
        n=2, src_channels=24, dst_channels=24, groups=24, src_spatial=(13, 12), dst_spatial=(13, 12), kernel=(1, 1)
    )
    found = []
    for op in OPS:
        layer = bias if op.startswith("BiasAdd") else transposed if op.startswith("ConvTranspose") else plain
        found += [replace(layer, op=op, bias=op == "BiasAdd", dtype=dtype) for dtype in ("f32", "f16", "bf16")]
    return found


def differs(client: Client, case: Case) -> bool:
    """Compute one call on both; return whether any bit differs."""
    inputs = case.inputs()
    there = client.run(case.op, inputs, case.attributes())
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
