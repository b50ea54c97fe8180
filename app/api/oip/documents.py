"""Documents of the `/v2` API: metadata and configuration of server and models, repository index."""

from __future__ import annotations

from typing import Any

from app.api.oip.infer import VERSION
from convgrad import __version__
from convgrad._dtypes import dtype
from schemas.rows import DTYPE_NAMES, REFERENCE_DTYPES, TensorRow
from schemas.tables import CalledOperation, operation_names

__all__ = ["model_config", "model_metadata", "repository_index", "server_metadata"]

_PLATFORM = "convgrad"
_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics")
# An operation has one to three spatial axes, but the protocol can state one rank only: that of two axes.
_RANK = 4


def server_metadata(*, shared_memory: bool) -> dict[str, Any]:
    """Describe the server."""
    extensions = [*_EXTENSIONS, *(["system_shared_memory"] if shared_memory else [])]
    return {"name": "convgrad", "version": __version__, "extensions": sorted(extensions)}


def model_metadata(called: CalledOperation) -> dict[str, Any]:
    """Describe a model, an operation under one of its names, in the dialect of that name."""
    return {
        "name": called.called_as,
        "versions": [VERSION],
        "platform": _PLATFORM,
        "inputs": [_metadata(called, row) for row in called.operation.inputs],
        "outputs": [_metadata(called, row) for row in called.operation.outputs],
    }


def model_config(called: CalledOperation, workers: int) -> dict[str, Any]:
    """Return a model's configuration as Triton's `ModelConfig`, with the attributes under `parameters`."""
    operation = called.operation
    inputs = [
        {
            **_config(called, row),
            "format": "FORMAT_NONE",
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            # The weights' shape may be a parameter instead.
            "optional": not row.required,
        }
        for row in operation.inputs
    ]
    parameters = {row.spelled(called.dialect): f"{row.kind}: {row.doc}" for row in operation.attributes}
    parameters |= {
        "datatypes": ", ".join(dtype(name).oip for name in DTYPE_NAMES),
        "reference": "bool: use the slow kernel that accumulates in float64; it alone computes "
        + ", ".join(dtype(name).oip for name in REFERENCE_DTYPES),
        "reproducible": "bool: the same bits on every kind of processor",
        "algorithm": "string: direct, winograd or auto, how convolutions and gradients are summed; direct by default",
        "dims": f"data tensors have {', '.join(map(str, operation.ranks))} dimensions; dims shows {_RANK}",
        "formula": operation.formula,
    }
    return {
        "name": called.called_as,
        "platform": _PLATFORM,
        "backend": _PLATFORM,
        "version_policy": {"specific": {"versions": [int(VERSION)]}},
        "max_batch_size": 0,
        "input": inputs,
        "output": [
            {**_config(called, row), "label_filename": "", "is_shape_tensor": False} for row in operation.outputs
        ],
        "instance_group": [{"name": called.called_as, "kind": "KIND_CPU", "count": workers}],
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
        "model_transaction_policy": {"decoupled": False},
    }


def repository_index(*, ready: bool, only_ready: bool) -> list[dict[str, str]]:
    """List every name of every operation, with its state."""
    if only_ready and not ready:
        return []
    state, reason = ("READY", "") if ready else ("UNAVAILABLE", "the service accepts no calls now")
    return [{"name": name, "version": VERSION, "state": state, "reason": reason} for name in operation_names()]


def _datatype(row: TensorRow) -> str:
    return "FP32" if row.dtypes == "T" else "INT64"


def _dims(row: TensorRow) -> list[int]:
    return [-1] if row.dtypes != "T" or row.name in ("bias", "diff_bias") else [-1] * _RANK


def _metadata(called: CalledOperation, row: TensorRow) -> dict[str, Any]:
    return {"name": row.spelled(called.dialect), "datatype": _datatype(row), "shape": _dims(row)}


def _config(called: CalledOperation, row: TensorRow) -> dict[str, Any]:
    return {"name": row.spelled(called.dialect), "data_type": f"TYPE_{_datatype(row)}", "dims": _dims(row)}
