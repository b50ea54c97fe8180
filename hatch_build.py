"""What the wheel holds besides the client: the service, as `convgrad/_service/`.

`app`, `engine`, `kernels`, `schemas` and `verify` are import names of the service's own process. At the top level of a wheel they
would collide with other people's packages.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SERVICE = ("app", "engine", "kernels", "schemas", "verify")


class ServiceHook(BuildHookInterface[Any]):
    """Add the service to a wheel; an editable install runs it from the checkout, not from a copy."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Say where each package of the service goes."""
        if version == "standard":
            build_data["force_include"] |= {name: f"convgrad/_service/{name}" for name in _SERVICE}
