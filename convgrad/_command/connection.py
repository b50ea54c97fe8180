"""The client that a command uses, and its wait for the service."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from convgrad._client import Client
from convgrad._events import Health
from convgrad._local import local
from convgrad._progress import ProgressBar
from convgrad._retry import DEFAULT_TIMEOUT

__all__ = ["connected", "draws", "opened", "wait"]


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[Client]:
    """Open the client that the flags describe; with `--wait`, once the service is ready."""
    with opened(options) as client:
        if options.wait is not None:
            wait(client, options)
        yield client


def opened(options: argparse.Namespace) -> Client:
    """Return the client that the flags describe, without waiting for the service unless it is local."""
    timeout = DEFAULT_TIMEOUT if options.timeout is None else options.timeout
    here = getattr(options, "local", False)
    if here or (here is None and not (options.url or options.uds)):
        try:
            return local(progress=False if options.quiet else None).open()
        except ImportError as error:  # an extra is missing
            raise ValueError(f"{error}; or give the address of a service with --url") from error
    if options.key and not options.cert:
        raise ValueError("--key needs --cert, the certificate that it belongs to")
    return Client(
        options.url,
        api_key=options.api_key,
        uds=options.uds,
        timeout=timeout,
        verify=options.cacert,
        cert=(options.cert, options.key) if options.key else options.cert,
    )


def wait(client: Client, options: argparse.Namespace) -> Health:
    """Wait up to `--wait` seconds until the service is ready, with a progress bar on a terminal."""
    if not draws(options):
        return client.wait_until_ready(options.wait)
    with ProgressBar(sys.stderr, "convgrad") as bar:
        return client.wait_until_ready(options.wait, on_poll=bar.waiting)


def draws(options: argparse.Namespace) -> bool:
    """Whether to draw a progress bar: on a terminal, unless told to be quiet."""
    return sys.stderr.isatty() and not getattr(options, "quiet", False)
