"""Self-tests: sealed checks that the caller's process judges itself, without limits of time."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from typing import Any

from convgrad._sealed import SELF_TEST
from engine.options import parse_options
from engine.process import Engine, metas_of
from engine.sealed.checks import SealedChecks
from engine.threads import Stop

__all__ = ["SelfTests"]


class SelfTests(SealedChecks):
    """The sealed checks of this process, signed with a random key of its own; thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        """Begin with an open lock: the thread that held it is not in the child."""
        self._lock = threading.Lock()

    def answer(self, engine: Engine, method: str, given: Mapping[str, Any], stop: Stop) -> dict[str, Any]:
        """Return the reply of a service to one of its `CHECK_METHODS`, or raise its error.

        A case has its seed in place of inputs, and a result is an array. One that `stop` ends can be submitted again.
        """
        with self._lock:
            match method:
                case "check.begin":
                    return {"check": self.begin(given, SELF_TEST, SELF_TEST).id}
                case "check.next":
                    return self._next(given)
                case "check.submit":
                    return self._submit(engine, given, stop)
                case "check.finish":
                    return self.finish(self.find(given["check"], SELF_TEST))
                case "check.drop":
                    return self.forget(given["check"], SELF_TEST)
                case "check.key":
                    return self.signer.public
            return self.verify_signature(given["document"])

    def _next(self, given: Mapping[str, Any]) -> dict[str, Any]:
        check = self.find(given["check"], SELF_TEST)
        case = check.current()
        if case is None and len(check.cases) < check.asked:
            case = check.give(check.draw())
        if case is None:
            return check.describe(None)
        case.as_seed |= given["send"] == "seed"
        return {**check.describe(case), "generate": case.case.as_json()}

    def _submit(self, engine: Engine, given: Mapping[str, Any], stop: Stop) -> dict[str, Any]:
        case = self.find(given["check"], SELF_TEST).case(given["case"])
        case.require_answerable()
        outcome, _, inputs = case.read_answer(given)
        if outcome is not None:
            return case.submit(outcome, lambda: case.note(outcome))
        problem, tensors = case.case.problem, {**inputs, **case.case.inputs()}
        options = parse_options(case.options)
        prepared = engine.preparer.prepare(problem.op, problem.attributes(), metas_of(tensors), options, verify=True)
        result = b"".join([array.tobytes() for array in inputs.values()])
        digest = hashlib.sha256(result).hexdigest()
        return case.submit(digest, lambda: case.judge(engine.judge(prepared, tensors, stop), result))
