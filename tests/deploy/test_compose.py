"""The compose file: what each profile starts, and what can be reached from outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from app.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ("convgrad", "replica-1", "replica-2", "convgrad-ray")


def started(profile: str | None) -> set[str]:
    """Return the names of the services that a profile starts, or that no profile is needed for."""
    return {
        name
        for name, service in SERVICES.items()
        if (profile in service["profiles"] if "profiles" in service else profile is None)
    }


def test_profiles() -> None:
    """Without a profile there is one service; each profile adds its own."""
    assert started(None) == {"convgrad"}
    assert started("replicas") == {"nginx", "replica-1", "replica-2"}
    assert started("cluster") == {"convgrad-ray", "ray-head", "ray-worker"}
    assert started("monitoring") == started("observability") == {"prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_containers_are_locked_down(name: str) -> None:
    """Each container has no capabilities, cannot gain any, is limited in memory, and, but for Grafana, read-only."""
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "mem_limit" in service
    assert service.get("read_only") is (None if name == "grafana" else True)


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_the_loopback_address(name: str) -> None:
    """By default other machines reach nothing; replicas and the nodes of the cluster publish no port at all."""
    ports = SERVICES[name].get("ports", [])
    assert all(re.fullmatch(r"\$\{CONVGRAD_PUBLISH\w*:-127\.0\.0\.1:\d+\}:\d+", port) for port in ports)
    assert bool(ports) is (name not in {"replica-1", "replica-2", "ray-head", "ray-worker"})


def test_internal_networks() -> None:
    """Replicas and nodes are in networks that do not reach the outside, and in no others."""
    assert all(COMPOSE["networks"][name]["internal"] for name in ("replicas", "cluster"))
    assert {name: SERVICES[name]["networks"] for name in ("replica-1", "replica-2", "ray-head", "ray-worker")} == {
        "replica-1": ["replicas"],
        "replica-2": ["replicas"],
        "ray-head": ["cluster"],
        "ray-worker": ["cluster"],
    }


@pytest.mark.parametrize("name", OURS)
def test_stopping_takes_longer_than_draining(name: str) -> None:
    """Docker kills a service only after its drain time."""
    grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings.model_fields["drain_s"].default
    assert "CONVGRAD_DRAIN_S" not in SERVICES[name]["environment"]


@pytest.mark.parametrize("name", ["convgrad-ray", "ray-head", "ray-worker"])
def test_the_cluster_has_a_token(name: str) -> None:
    """Nodes authenticate with a token that is a secret, not a variable."""
    environment = SERVICES[name]["environment"]
    assert SERVICES[name]["secrets"] == ["ray_token"]
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/secrets/ray_token")
    assert not [key for key in environment if key == "RAY_AUTH_TOKEN"]


@pytest.mark.parametrize("name", ["replica-1", "replica-2"])
def test_nginx_knows_every_replica(name: str) -> None:
    """nginx sends calls to each replica, which refuses connections while it can't compute them."""
    listed = re.findall(
        r"^server (\S+):8000 max_fails=0;$", (ROOT / "deploy/nginx/replicas.conf").read_text(), re.MULTILINE
    )
    assert name in listed
    assert SERVICES[name]["environment"]["CONVGRAD_LISTEN_WHEN_READY"] == "true"
    assert SERVICES["nginx"]["depends_on"][name] == {"condition": "service_healthy"}
    targets = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"][0]
    assert name in targets["dns_sd_configs"][0]["names"]


def test_nginx_waits_longer_than_the_longest_call() -> None:
    """nginx waits for replies longer than the deadline, and closes idle connections before the 75 s of the service."""
    text = (ROOT / "deploy/nginx/nginx.conf").read_text("utf-8")
    (read,) = re.findall(r"proxy_read_timeout (\d+)s;", text)
    assert int(read) > Settings.model_fields["deadline_s"].default
    (idle,) = re.findall(r"keepalive 64;[^}]*keepalive_timeout (\d+)s;", text)
    assert int(idle) < 75
