"""The subcommand mcp."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from convgrad._launch import install_hint

__all__ = ["mcp"]


def mcp(options: argparse.Namespace) -> int:
    """Serve the Model Context Protocol on standard input and output, computing in this process."""
    if find_spec("mcp") is None:
        raise ValueError(f"the Model Context Protocol needs the package mcp: {install_hint('mcp')}")
    if options.root is not None and not options.root.is_dir():
        raise ValueError("--root must be a folder that exists")
    from convgrad._mcp.local import serve

    serve(options.root)
    return 0
