"""The methods of jobs: the params that each takes, and what it returns."""

from __future__ import annotations

from typing import Any

from schemas.checks import CheckMethod

__all__ = ["JOB_METHODS"]

_JOB: dict[str, Any] = {"type": "string", "description": "Id of the job."}
_STATE: dict[str, Any] = {
    "job": _JOB,
    "state": {"enum": ["queued", "running", "done", "failed", "cancelled"]},
    "kind": {"enum": ["compute", "verify", "tolerance", "graph"]},
    "op": {"type": ["string", "null"], "description": "The operation."},
    "created": {"type": "string", "description": "When it was submitted, in UTC."},
}
_OBJECT = {"type": "object", "required": [*_STATE], "properties": _STATE}

JOB_METHODS: dict[str, CheckMethod] = {
    "jobs.submit": CheckMethod(
        "Keep a call and compute it, whether or not anybody waits: `place`, `progress`, `expires` and `error` follow.",
        {
            "method": {"type": "string", "description": "An operation, ops.verify, ops.tolerance or graph.run."},
            "params": {"type": ["object", "array"], "items": {}, "description": "The params of that method."},
            "idempotency_key": {
                "type": ["string", "null"],
                "description": "The same key with the same request is the same job, with another request an error.",
                "pattern": "^[!-~]{1,255}$",
            },
        },
        ("method", "params"),
        _STATE,
    ),
    "jobs.get": CheckMethod("Return the state of a job.", {"job": _JOB}, ("job",), _STATE),
    "jobs.result": CheckMethod("Return the result of a job, as its method would.", {"job": _JOB}, ("job",), {}),
    "jobs.list": CheckMethod(
        "Return the states of one's own jobs, the newest first.", {}, (), {"jobs": {"type": "array", "items": _OBJECT}}
    ),
    "jobs.cancel": CheckMethod("Cancel a job, or forget one that has ended.", {"job": _JOB}, ("job",), _STATE),
}
"""The methods by name."""
