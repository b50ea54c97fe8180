"""Certificates: which ones a client trusts, and its own."""

from __future__ import annotations

import os
import ssl

import httpx

__all__ = ["Certificate", "File", "Trust", "tls_context"]

File = str | os.PathLike[str]

Trust = ssl.SSLContext | File | bool
"""Which certificates a client trusts: a TLS context, a PEM file of authorities, or whether to verify any."""

Certificate = File | tuple[File, File] | tuple[File, File, str]
"""A client's certificate: a PEM file with its private key, or two files, or two and the password of the second."""


def tls_context(verify: Trust | None, cert: Certificate | None) -> ssl.SSLContext:
    """Return the TLS context of a client; None stands for the variables CONVGRAD_CACERT, CONVGRAD_CERT and _CERT_KEY.

    Raises `ValueError` for a file that can't be read or is not what it should be.
    """
    if verify is None:
        verify = os.environ.get("CONVGRAD_CACERT") or True
    if cert is None and (path := os.environ.get("CONVGRAD_CERT")):
        key = os.environ.get("CONVGRAD_CERT_KEY")
        cert = (path, key) if key else path
    context = _trusting(verify)
    if cert is not None:
        files = cert if isinstance(cert, tuple) else (cert,)
        try:
            # An empty password, so that OpenSSL does not ask for one on the terminal.
            password = files[2] if len(files) == 3 else ""
            context.load_cert_chain(files[0], files[1] if len(files) > 1 else None, password)
        except OSError as error:
            names = " and ".join(os.fspath(file) for file in files[:2])
            rule = "must be PEM files of a certificate and its private key"
            raise ValueError(f"{names} {rule}: {_cause(error)}") from error
    return context


def _trusting(verify: Trust) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext | bool):
        return httpx.create_ssl_context(verify)
    try:
        return ssl.create_default_context(cafile=os.fspath(verify))
    except OSError as error:
        raise ValueError(f"{os.fspath(verify)} must be a PEM file of certificates: {_cause(error)}") from error


def _cause(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
