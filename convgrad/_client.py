"""The blocking client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from convgrad._base import BaseClient
from convgrad._blocking import Blocking, blocking, complete
from convgrad._events import Array
from convgrad._jobs import blocking_job
from convgrad._operations import Operations
from convgrad._retry import DEFAULT_TIMEOUT, Retry, Timeout
from convgrad._stream import blocking_stream

if TYPE_CHECKING:
    import httpx

    from convgrad._tls import Certificate, Trust

__all__ = ["Client"]


class Client(Blocking[BaseClient], Operations[Array]):
    """Compute convolution gradients on a convgrad service.

    `url` is the service's address, by default CONVGRAD_URL or http://127.0.0.1:8000; with a Unix socket `uds`, its host
    may be any name. `api_key`, by default CONVGRAD_API_KEY, is sent as a Bearer token. `timeout` is that of httpx, in
    seconds. `retry` sets how often a call is retried; None disables retries. `transport` replaces the network, for
    tests. Tensors may be arrays of any strides and byte order, and anything that NumPy or DLPack can read, such as
    PyTorch tensors; results are writeable arrays. A client is thread-safe; use it in a `with` block, or close it.

    For HTTPS, `verify` is a PEM file of the authorities to trust, by default CONVGRAD_CACERT or those of httpx, a TLS
    context, or False to disable verification. `cert` is the client certificate: one PEM file, or a pair of certificate
    and private key, by default CONVGRAD_CERT and CONVGRAD_CERT_KEY; a third member is the password of the key.

    Raises `ValueError` for a URL that is not HTTP, certificate files that can't be used, and an API key that a header
    can't contain; the message does not show the key. A call that fails raises a `ConvgradError`, with these exceptions:
    `OSError` for files that can't be read, `ValueError` for a graph file that is not JSON and for a tensor that no node
    computes, `TypeError` for arguments of the wrong type, and `RuntimeError` for a closed client.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        retry: Retry | None = Retry(),  # noqa: B008 - frozen
        transport: httpx.BaseTransport | None = None,
        uds: str | os.PathLike[str] | None = None,
        verify: Trust | None = None,
        cert: Certificate | None = None,
    ) -> None:
        import httpx

        from convgrad._http import BlockingNetwork, Http
        from convgrad._tls import tls_context

        trust = tls_context(verify, cert)
        if uds is not None and transport is None:
            transport = httpx.HTTPTransport(uds=os.fspath(uds), verify=trust)
        network = BlockingNetwork(httpx.Client(transport=transport, verify=trust))
        self._async = BaseClient(Http(network, url, api_key, timeout, retry))

    run = blocking(BaseClient.run)
    run_outputs = blocking(BaseClient.run_outputs)
    run_detailed = blocking(BaseClient.run_detailed)
    validate = blocking(BaseClient.validate)
    verify = blocking(BaseClient.verify)
    tolerance = blocking(BaseClient.tolerance)
    run_graph = blocking(BaseClient.run_graph)
    verify_graph = blocking(BaseClient.verify_graph)
    validate_graph = blocking(BaseClient.validate_graph)
    submit = blocking_job(BaseClient.submit)
    submit_verification = blocking_job(BaseClient.submit_verification)
    submit_graph = blocking_job(BaseClient.submit_graph)
    job = blocking_job(BaseClient.job)
    jobs = blocking(BaseClient.jobs)
    begin_check = blocking(BaseClient.begin_check)
    next_case = blocking(BaseClient.next_case)
    submit_result = blocking(BaseClient.submit_result)
    submit_outcome = blocking(BaseClient.submit_outcome)
    finish_check = blocking(BaseClient.finish_check)
    drop_check = blocking(BaseClient.drop_check)
    check_key = blocking(BaseClient.check_key)
    verify_signature = blocking(BaseClient.verify_signature)
    operations = blocking(BaseClient.operations)
    describe = blocking(BaseClient.describe)
    health = blocking(BaseClient.health)
    wait_until_ready = blocking(BaseClient.wait_until_ready)
    stream = blocking_stream(BaseClient.stream)

    def close(self) -> None:
        """Close the connections."""
        complete(self._async.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
