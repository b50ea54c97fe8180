"""Every setting of the service: one frozen object, read once from `CONVGRAD_*` and from flags."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.container import cpu_count, memory_bytes

__all__ = ["Settings"]

_GIB = 1 << 30


class Settings(BaseSettings):
    """Hold what an operator may decide; sizes take units, such as `512MiB`."""

    model_config = SettingsConfigDict(env_prefix="CONVGRAD_", frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    uds: Path | None = Field(default=None, description="Unix socket to listen on instead of host and port.")
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
    body_limit: ByteSize = Field(default=ByteSize(_GIB), ge=1, description="Largest request body in bytes.")
    head_limit: ByteSize = Field(
        default=ByteSize(256 << 10),
        ge=1024,
        description="Largest request without its tensors: attributes, names, shapes.",
    )
    work_limit: int = Field(default=10**13, ge=1, description="Most multiply-adds of one call.")
    output_limit: ByteSize = Field(default=ByteSize(_GIB), ge=1, description="Largest output tensor in bytes.")
    memory_limit: ByteSize = Field(
        default=ByteSize(0),
        ge=0,
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
    cors: tuple[str, ...] = Field(default=(), description='Origins that browsers may call from; ["*"] for any.')
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

    @cached_property
    def worker_count(self) -> int:
        """Worker processes to run."""
        return self.workers or cpu_count()

    @cached_property
    def memory_budget(self) -> int:
        """Bytes that the tensors of all calls may take together."""
        return int(self.memory_limit) or memory_bytes() // 2
