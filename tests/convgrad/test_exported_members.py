"""The public surface of the client package."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from types import ModuleType

import pytest

import convgrad
from convgrad._errors import error_classes


def test_all_lists_everything_public() -> None:
    """`__all__` is sorted and lists all public names, and nothing else."""
    assert isinstance(convgrad.Client, type)  # imports the rest
    public = [
        name
        for name, value in vars(convgrad).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "TYPE_CHECKING"
    ]
    assert convgrad.__all__ == sorted([*public, "__version__"])


def test_the_client_is_imported_when_it_is_used() -> None:
    """Errors, which the service shares, and a local client load no httpx or kernels; unknown names are refused."""
    loaded = "{'numba', 'httpx', 'kernels', 'engine'} & {*sys.modules}"
    code = (
        f"import sys, convgrad; convgrad.NotFound; convgrad.local(); print({loaded}); convgrad.Client; convgrad.Clinet"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "set()\n"
    assert "AttributeError: module 'convgrad' has no attribute 'Clinet'. Did you mean: 'Client'?" in done.stderr


def test_all_errors_are_public() -> None:
    """Every error class can be imported from the package."""
    assert {cls.__name__ for cls in error_classes().values()} <= set(convgrad.__all__)


def test_errors_survive_pickling() -> None:
    """An error that is sent to another process keeps its class, message and data."""
    error = convgrad.Overloaded("full", retry_after=3, data={"limit": 2})
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.data) == (convgrad.Overloaded, "full", {"limit": 2, "retry_after": 3})


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [
        (convgrad.Client, convgrad.AsyncClient),
        (convgrad.Stream, convgrad.AsyncStream),
        (convgrad.Job, convgrad.AsyncJob),
    ],
)
def test_both_clients_have_the_same_methods(blocking: type, asynchronous: type) -> None:
    """Names, parameters and docstrings agree, and every method has a docstring; only closing is called `aclose`."""
    methods = {name: method for name, method in inspect.getmembers(blocking, callable) if not name.startswith("_")}
    twins = {name for name, _ in inspect.getmembers(asynchronous, callable) if not name.startswith("_")}
    assert {name.replace("close", "aclose") for name in methods} == twins
    for name, method in methods.items():
        twin = getattr(asynchronous, name.replace("close", "aclose"))
        assert inspect.signature(method).parameters == inspect.signature(twin).parameters
        assert inspect.getdoc(method) == inspect.getdoc(twin) is not None
        assert not inspect.iscoroutinefunction(method)
