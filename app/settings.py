"""Every setting of the service: one frozen object, read once from `CONVGRAD_*` and from flags."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.pool.container import cpu_count, memory_bytes

__all__ = ["PREFIX", "Settings", "is_loopback", "unknown_variables"]

PREFIX = "CONVGRAD_"

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_HOST_NAME = re.compile(r"\*|[a-z0-9._-]+")
# Variables of this prefix that others read: kernels and their tools, the client, scripts, docker-compose.yml.
_OTHERS = (
    *("TARGET", "CPU_FEATURES", "CPU_IMITATE", "PLAN_MEMORY", "BUILD_FOR", "UNFIT_TARGETS"),
    *("URL", "API_KEY"),
    *("VENV", "ARM64", "PROMETHEUS", "SMOKE_PORT"),
    *("TARGETS", "PUBLISH", "PUBLISH_PROMETHEUS", "PUBLISH_GRAFANA", "CPUS", "MEMORY"),
)


def _split(value: object) -> object:
    """Take a list as people write it in a variable, with commas, or as JSON."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _at_least(least: int, reason: str, *, or_zero: bool = False) -> Callable[[ByteSize], ByteSize]:
    def check(value: ByteSize) -> ByteSize:
        if value >= least or (or_zero and not value):
            return value
        smallest = f"{ByteSize(least).human_readable(separator=' ')}{', or 0' if or_zero else ''}"
        raise ValueError(f"{int(value)} is too small, the least is {smallest}: {reason}")

    return check


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list of words, separated by commas."""

_BODY = AfterValidator(_at_least(_KIB, "a call of one small tensor has some hundreds of bytes"))
_MEMORY = AfterValidator(
    _at_least(_MIB, "each tensor of a call takes 64 KiB or more, and so does its scratch memory", or_zero=True)
)


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    named = tuple(host.lower() for host in hosts)
    if not all(_HOST_NAME.fullmatch(host) or _is_address(host) for host in named):
        raise ValueError("a list of host names and addresses, without scheme and port, or * for any")
    return named


def _split_hosts(value: object) -> object:
    """Take names with commas between; the brackets of IPv6 addresses, or of a JSON list, don't count."""
    return [part.strip(' []"') for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Hosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_hosts), AfterValidator(_check_hosts)]


class Settings(BaseSettings):
    """Hold what an operator may decide; sizes take units, such as `512MiB`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    uds: Path | None = Field(default=None, description="Unix socket to listen on instead of host and port.")
    ops_host: str = Field(default="127.0.0.1", description="Address of ops_port.")
    ops_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port for health and metrics alone, over plain HTTP without a key; by default there is none.",
    )
    public: bool = Field(
        default=False, description="Listen on an address that others can reach although no key is asked for."
    )
    keys_file: Path | None = Field(
        default=None,
        description="File of API keys, one a line; read again when it changes.",
    )
    keys: SecretStr | None = Field(
        default=None,
        description="The same lines as text, ended by line breaks or ';': a secret in the environment.",
    )
    tls_certificate: Path | None = Field(
        default=None, description="Certificate chain in PEM form: serve HTTPS instead of HTTP."
    )
    tls_key: Path | None = Field(default=None, description="Private key of the certificate, if it is not in its file.")
    tls_key_password: SecretStr | None = Field(default=None, description="Password of the private key.")
    tls_client_ca: Path | None = Field(
        default=None, description="Take only clients with a certificate that one of these authorities has signed."
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Worker processes; 0 takes one for each processor of the container.",
    )
    engine: Literal["local"] = Field(default="local", description="Where tiles are computed.")
    queue_length: int = Field(
        default=64, ge=1, description="Calls that may wait or compute at a time; more are refused with 503."
    )
    key_calls: int = Field(
        default=0,
        ge=0,
        description="Calls that one key may have at a time, unless its line says otherwise; 0: its share of the queue.",
    )
    connections: int = Field(
        default=1024,
        ge=1,
        description="Connections at a time; more are refused with 503, but for health and metrics.",
    )
    slow_s: float = Field(
        default=30.0, gt=0, le=3600, description="Seconds that a sender or a reader may take for the next bytes."
    )
    slow_rate: ByteSize = Field(
        default=ByteSize(16 << 10), ge=1, description="Bytes a second that a sender and a reader must reach on average."
    )
    body_limit: Annotated[ByteSize, _BODY] = Field(default=ByteSize(_GIB), description="Largest request body in bytes.")
    head_limit: ByteSize = Field(
        default=ByteSize(256 << 10),
        ge=1024,
        description="Largest request without its tensors: attributes, names, shapes.",
    )
    work_limit: int = Field(default=10**13, ge=1, description="Most multiply-adds of one call.")
    output_limit: ByteSize = Field(default=ByteSize(_GIB), ge=1, description="Largest output tensor in bytes.")
    memory_limit: Annotated[ByteSize, _MEMORY] = Field(
        default=ByteSize(0),
        description="Bytes of tensors of all calls together; 0 takes half of the container's.",
    )
    deadline_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="Longest time of one call, in seconds, whatever it asks for.",
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="Seconds that running calls get to finish after SIGTERM."
    )
    allowed_hosts: Hosts = Field(
        default=(),
        description="Host names that callers may ask by, with commas; localhost is all loopback names, * any name. "
        "By default localhost on a loopback address without keys, and otherwise any.",
    )
    cors: Names = Field(default=(), description="Origins that browsers may call from, with commas; * for any.")
    oip_shared_memory: bool = Field(
        default=False,
        description="Let clients of this host pass tensors to /v2 in POSIX shared memory of the service's user.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="Where OpenTelemetry spans go, such as http://127.0.0.1:4318/v1/traces; needs the extra [otel].",
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Form of the log lines.")

    @field_validator("work_limit", mode="before")
    @classmethod
    def _scientific(cls, value: object) -> object:
        # 1e13 is how people write such a number; int("1e13") is an error.
        if isinstance(value, str) and value.strip().lower().replace("e", "", 1).replace("+", "", 1).isdecimal():
            return int(float(value))
        return value

    @model_validator(mode="after")
    def _not_open_by_accident(self) -> Self:
        if not (self.public or self.has_keys or self.uds or self.tls_client_ca or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} can be reached by others and no key is asked for: name a keys_file, "
                "or set public to true if something else keeps strangers out"
            )
        if self.tls_certificate is None and (self.tls_key or self.tls_client_ca):
            raise ValueError("tls_key and tls_client_ca need a tls_certificate")
        return self

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return self.keys_file is not None or self.keys is not None

    @cached_property
    def hosts(self) -> frozenset[str]:
        """Names that callers may ask by; `*` stands for any, `localhost` for all loopback names."""
        if self.allowed_hosts:
            return frozenset(self.allowed_hosts)
        # Whoever needs a key, or comes another way than a browser can, gains nothing by another name.
        browsers_reach_it = is_loopback(self.host) and not (self.has_keys or self.uds or self.tls_client_ca)
        return frozenset({"localhost" if browsers_reach_it else "*"})

    @cached_property
    def worker_count(self) -> int:
        """Worker processes to run."""
        return self.workers or cpu_count()

    @cached_property
    def memory_budget(self) -> int:
        """Bytes that the tensors of all calls may take together."""
        return int(self.memory_limit) or memory_bytes() // 2


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """Say of each variable that has our prefix and that nothing reads which one may be meant."""
    known = [PREFIX + name.upper() for name in Settings.model_fields] + [PREFIX + name for name in _OTHERS]
    for name in names:
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, 1, 0.0)
            yield f"{name} is no setting and is not read; is {close[0]} meant?"


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Tell whether a name or address means this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
