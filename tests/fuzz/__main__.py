"""Coverage-guided fuzzing with atheris (`scripts/fuzz [TARGET ..]`, all when none is named); `openapi` calls the
pages of a running service with schemathesis instead.

Before a target is fuzzed, `tests.fuzz.memory` checks that its memory does not grow. Findings are kept in
`.cache/fuzz`: inputs that reach new code, and, as `TARGET-crash-..`, one that violates a check.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["app", "convgrad", "schemas"]):
    from tests.fuzz.targets import TARGETS, Target

from tests.fuzz.mutation import LONGEST
from tests.hostile.openapi import run_schemathesis
from tests.live import running_service

_OPENAPI = "openapi"
_FOLDER = Path(__file__).parents[2] / ".cache" / "fuzz"


def main() -> None:
    """Parse the command line and run a target; the process exits with the status of the run."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    names = [*TARGETS, _OPENAPI]
    parser.add_argument("targets", nargs="*", choices=[[], *names], metavar="TARGET", help=", ".join(names))
    parser.add_argument("--runs", type=int, help=f"inputs of each target; of each page for {_OPENAPI}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="try an input that was found before")
    given = parser.parse_args()
    if len(given.targets) != 1:
        # libFuzzer exits the process that it runs in.
        flags = ["--seed", str(given.seed), *([] if given.runs is None else ["--runs", str(given.runs)])]
        for name in given.targets or TARGETS:
            subprocess.run([sys.executable, "-m", "tests.fuzz", *flags, name], check=True)
    elif given.targets == [_OPENAPI]:
        _call_pages(given.runs or 500, given.seed)
    elif given.repeat is not None:
        TARGETS[given.targets[0]].take(given.repeat.read_bytes())
    else:
        _fuzz(given.targets[0], given.runs or 100_000, given.seed)


def _call_pages(examples: int, seed: int) -> None:
    with running_service() as service:
        done = run_schemathesis(service.url, examples=examples, seed=seed)
    print(done.stdout, done.stderr)
    sys.exit(done.returncode)


def _fuzz(name: str, runs: int, seed: int) -> None:
    target = TARGETS[name]
    warnings.simplefilter("ignore")  # NumPy reads headers written by Python 2, but warns about them
    flags = f"-runs={runs} -seed={seed} -max_len={LONGEST} -timeout=5 -rss_limit_mb=2048 -verbosity=0".split()
    files = _files(name, target)
    subprocess.run([sys.executable, "-m", "tests.fuzz.memory", name, files[-1]], check=True)
    atheris.Setup([sys.argv[0], *flags, *files], _counted(name, target, runs))
    atheris.Fuzz()


def _files(name: str, target: Target) -> list[str]:
    """Write the seeds and words for libFuzzer; return its arguments. The corpus also has inputs of earlier runs."""
    corpus, words = _FOLDER / name, _FOLDER / f"{name}.words"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    return [f"-dict={words}", f"-artifact_prefix={_FOLDER}/{name}-", str(corpus)]


def _counted(name: str, target: Target, runs: int) -> Callable[[bytes], None]:
    """Return a function that feeds `target`, and reports after the last of `runs` inputs."""
    begin, count = time.monotonic(), 0

    def take(data: bytes) -> None:
        nonlocal count
        target.take(data)
        count += 1
        if count == runs:
            print(f"{name}: {count} inputs in {time.monotonic() - begin:.0f} s, none broke a promise")

    return take


if __name__ == "__main__":
    main()
