"""The settings of the service: one frozen object, read once from `CONVGRAD_*` variables and flags."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    FilePath,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliImplicitFlag, CliSettingsSource, NoDecode, SettingsConfigDict

from convgrad._command.exits import UsageError
from convgrad._command.parser import Parser
from engine.container import cpu_count, memory_bytes
from engine.planning import Limits

__all__ = ["PREFIX", "Settings", "is_loopback", "many_workers", "read_settings", "unknown_variables"]

PREFIX = "CONVGRAD_"

# Other programs have variables with this prefix too: warn only of names that are nearly a setting's.
_ALIKE = 0.8

_KIB, _GIB = 1 << 10, 1 << 30
_MANY = 4  # workers for each processor
# By the types of pydantic's errors about numbers.
_RULES = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "int_parsing": "must be an integer",
    "float_parsing": "must be a number",
}
_EXITS = "exit status: 0 stopped by a signal, 2 invalid setting or file, 3 the address is taken, 4 no worker can start"
_HOST_NAME = re.compile(r"\*|[a-z0-9._-]+")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")


def _split(value: object) -> object:
    """Split a list written with commas, or as JSON; brackets around IPv6 addresses are dropped."""
    return [part.strip(' []"') for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError("must be origins such as https://example.org, without a path, or * for any")
    return origins


Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_origins)]


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    named = tuple(host.lower() for host in hosts)
    if not all(_HOST_NAME.fullmatch(host) or _is_address(host) for host in named):
        raise ValueError("must be host names and addresses without scheme and port, or * for any")
    return named


Hosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_hosts)]


def _scientific(value: object) -> object:
    """Read a number as people write it, such as 1e13, which int() does not parse."""
    if isinstance(value, str) and value.strip().lower().replace("e", "", 1).replace("+", "", 1).isdecimal():
        return int(found) if math.isfinite(found := float(value)) else value
    return value


Count = Annotated[int, BeforeValidator(_scientific)]
Size = Annotated[ByteSize, BeforeValidator(_scientific)]


class Settings(BaseSettings):
    """The settings of the service; sizes accept units, such as `512MiB`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Count = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    uds: Path | None = None
    """Unix socket to listen on instead of host and port; for its owner and group, less the umask."""
    ops_host: str = "127.0.0.1"
    """Address of ops_port."""
    ops_port: Count | None = Field(default=None, ge=0, le=65535)
    """Separate port for health and metrics only, plain HTTP without a key; none by default."""
    public: bool = False
    """Allow listening without keys on an address that other machines can reach."""
    keys_file: FilePath | None = None
    """File with API keys, one per line; read again when it changes."""
    keys: SecretStr | None = None
    """The same lines as text, separated by line breaks or ';', for a secret in the environment."""
    tls_certificate: FilePath | None = None
    """PEM file with the certificate chain; serves HTTPS instead of HTTP."""
    tls_key: FilePath | None = None
    """Private key, if it is not in the certificate's file."""
    tls_client_ca: FilePath | None = None
    """PEM file of CAs: only clients with a certificate signed by one are accepted."""
    workers: Count = Field(default=0, ge=0, le=1024)
    """Worker processes; 0 means one per processor of the container."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where operations are computed: on cpu, or on cuda, the first GPU of CUDA_VISIBLE_DEVICES, by one worker, which
    needs the extra [gpu]."""
    engine: Literal["local", "ray"] = "local"
    """Where large calls are computed: local, on this machine, or ray, on a Ray cluster too, which needs the extra
    [ray]."""
    ray_address: str = ""
    """Address of the Ray cluster's head, such as 10.0.0.1:6379; by default that of this machine's node."""
    ray_join: Size = ByteSize(0)
    """Memory for tensors of a node without processors, which the service starts on this machine to send them; 0
    means that the machine is a node already."""
    ray_workers: Count = Field(default=8, ge=1, le=1024)
    """Usual number of processors of the cluster: calls are cut into units for as many workers, in addition to the
    service's own."""
    queue_length: Count = Field(default=64, ge=1)
    """Calls that may wait or compute at a time; more are rejected with 503."""
    connections: Count = Field(default=1024, ge=1)
    """Open connections; more are rejected with 503, except for health and metrics."""
    body_limit: Size = Field(default=ByteSize(_GIB), ge=_KIB)
    """Largest request body in bytes; the outputs of a call may have as many, or 1 GiB if that is more."""
    json_limit: Size = Field(default=ByteSize(64 << 20), ge=1024)
    """Largest JSON body, or JSON part of a body, in bytes."""
    work_limit: Count = Field(default=10**13, ge=1)
    """Most multiply-adds of one call."""
    memory_limit: Size = Field(default=ByteSize(0), ge=0)
    """Memory for the tensors of all calls together, in bytes; 0 means half of the container's."""
    deadline_s: float = Field(default=300.0, gt=0, le=86_400)
    """Longest time of one call, in seconds, whatever deadline it requests."""
    check_key_file: Path | None = None
    """PEM file with the Ed25519 key that signs sealed checks, made if it is missing; by default the key is random until
    the service restarts."""
    spool: Path | None = None
    """Folder on a disk of this machine for the requests and results of jobs; replicas may share it. Without it there
    are no jobs, and nothing is written."""
    spool_limit: Size = Field(default=ByteSize(10 * _GIB), ge=1)
    """Bytes that all jobs may take in the spool."""
    spool_key_limit: Size = Field(default=ByteSize(4 * _GIB), ge=1)
    """Bytes that the jobs of a key, or without keys of an address, may take."""
    spool_key_jobs: Count = Field(default=1000, ge=1)
    """Jobs that a key or address may have in the spool, those that have ended included."""
    spool_keep_s: float = Field(default=86_400.0, gt=0)
    """Seconds that results are kept."""
    drain_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that running calls have to finish after SIGTERM."""
    listen_when_ready: bool = False
    """Refuse connections, instead of answering 503, while starting and draining, so that a proxy sends each call to
    another replica."""
    allowed_hosts: Hosts = ()
    """Accepted names in the Host header, separated by commas; localhost covers all loopback names, * any name.
    Defaults to localhost on a loopback address without keys, otherwise to any."""
    cors: Origins = ()
    """Origins that browsers may call from, separated by commas; * for any."""
    oip_shared_memory: bool = False
    """Let clients on this host pass tensors to /v2 in POSIX shared memory of the service's user."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log: text, or json for programs."""

    @field_validator("memory_limit", "body_limit", "ray_join")
    @classmethod
    def _is_there(cls, value: ByteSize) -> ByteSize:
        if value > (most := memory_bytes()):
            raise ValueError(
                f"must be at most the memory of this machine or container, {most} bytes, but is {int(value)}"
            )
        return value

    @field_validator("device", "engine")
    @classmethod
    def _has_one_worker(cls, value: str, info: ValidationInfo) -> str:
        if value == "cuda" and (workers := info.data.get("workers", 0)) > 1:
            raise ValueError(f"cuda has one worker, but --workers is {workers}: start a service for each GPU")
        if value == "ray" and info.data.get("device") == "cuda":
            raise ValueError("ray computes on processors, but --device is cuda")
        return value

    @field_validator("tls_key", "tls_client_ca")
    @classmethod
    def _needs_certificate(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("tls_certificate", ...) is None:
            raise ValueError("needs --tls-certificate")
        return value

    @model_validator(mode="after")
    def _not_open_by_accident(self) -> Self:
        if not (self.public or self.has_keys or self.uds or self.tls_client_ca or is_loopback(self.host)):
            raise ValueError(
                "must be a loopback address while there are no API keys: set --keys-file, "
                "or --public true if access is restricted in another way"
            )
        return self

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return self.keys_file is not None or self.keys is not None

    @cached_property
    def hosts(self) -> frozenset[str]:
        """Accepted names in the Host header; `*` stands for any, `localhost` for all loopback names."""
        if self.allowed_hosts:
            return frozenset(self.allowed_hosts)
        # DNS rebinding gains nothing where a key is needed or browsers can't connect.
        browsers_reach_it = is_loopback(self.host) and not (self.has_keys or self.uds or self.tls_client_ca)
        return frozenset({"localhost" if browsers_reach_it else "*"})

    @cached_property
    def worker_count(self) -> int:
        """Number of worker processes to run."""
        return self.workers or (1 if self.device == "cuda" else cpu_count())

    @cached_property
    def memory_budget(self) -> int:
        """Bytes that the tensors of all calls may take together."""
        return int(self.memory_limit) or memory_bytes() // 2

    @cached_property
    def limits(self) -> Limits:
        """What a call may take."""
        cluster, work = self.ray_workers if self.engine == "ray" else 0, self.work_limit
        output, memory = max(int(self.body_limit), _GIB), self.memory_budget
        return Limits(self.worker_count, cluster, work, output, memory, full_verification=work, device=self.device)


class _Flags(Settings):
    """Serve convolution gradients over HTTP. Every flag is also an environment variable, CONVGRAD_<NAME>.

    Sizes take units, such as 512MiB, and whole numbers exponents, such as 1e9; lists are separated by commas.
    """

    # An empty variable is unset, but an empty flag is a value: `--host ""` means every address.
    model_config = SettingsConfigDict(cli_kebab_case=True, env_ignore_empty=False)

    dry_run: CliImplicitFlag[bool] = False
    """Check the settings and the files that they name, print them, and exit."""


def read_settings(arguments: Sequence[str]) -> tuple[Settings, bool]:
    """Return the settings of flags and of variables, flags first, and whether it is a dry run.

    Raises `UsageError`, with a line for each setting that is wrong.
    """
    parser = Parser(prog="convgrad serve", description=inspect.getdoc(_Flags), epilog=_EXITS)
    flags = CliSettingsSource[Any](_Flags, root_parser=parser)(args=list(arguments))()
    dry_run = bool(flags.pop("dry_run", False))
    try:
        return Settings(**flags), dry_run
    except ValidationError as error:
        # What the whole model checks is whether its host is safe.
        raise UsageError("\n".join(f"--{_fault(each)}" for each in error.errors(include_url=False))) from None


def _fault(error: ErrorDetails) -> str:
    """Return the flag, the value where it is a number's, and the rule."""
    flag = str((*error["loc"], "host")[0]).replace("_", "-")
    if (rule := _RULES.get(error["type"])) is not None:
        return f"{flag} {error['input']}: {rule.format(**error.get('ctx', {}))}"
    return f"{flag}: {error['msg'].removeprefix('Value error, ')}"


def many_workers(settings: Settings) -> Iterator[str]:
    """Yield a warning for far more workers than processors."""
    if settings.worker_count > _MANY * (processors := cpu_count()):
        yield f"--workers {settings.worker_count}: there are {processors} processors, and more workers only wait"


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each variable that is probably a misspelt setting, with the closest one."""
    known = [name.upper() for name in Settings.model_fields]
    for name in names:
        word = name.upper().removeprefix(PREFIX)
        if name.upper().startswith(PREFIX) and word not in known:
            for close in get_close_matches(word, known, 1, _ALIKE):
                yield f"{name} is not a setting and is ignored; did you mean {PREFIX}{close}?"


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's loopback."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
