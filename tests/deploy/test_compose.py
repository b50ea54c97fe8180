"""The compose file: what each profile starts, and what can be reached from outside."""

from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from app.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ("convgrad", "replica-1", "replica-2", "convgrad-ray")
RAY = ("convgrad-ray", "ray-head", "ray-worker")


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
    assert bool(ports) is (name not in {"replica-1", "replica-2", "ray-token", "ray-head", "ray-worker"})


def test_internal_networks() -> None:
    """Replicas and nodes are in networks that do not reach the outside, and in no others; the token is made in none.

    The replicas trust the addresses of a network that only they and nginx are in.
    """
    assert SERVICES["ray-token"]["network_mode"] == "none"
    assert all(COMPOSE["networks"][name]["internal"] for name in ("replicas", "metrics", "cluster"))
    for names, networks in ((("replica-1", "replica-2"), ["replicas", "metrics"]), (RAY[1:], ["cluster"])):
        assert [SERVICES[name]["networks"] for name in names] == [networks] * 2
    subnet = SERVICES["replica-1"]["environment"]["FORWARDED_ALLOW_IPS"]
    assert COMPOSE["networks"]["replicas"]["ipam"]["config"] == [{"subnet": subnet}]
    inside = {name for name, each in SERVICES.items() if "replicas" in each.get("networks", [])}
    assert inside == {"nginx", "replica-1", "replica-2"}


@pytest.mark.parametrize("name", OURS)
def test_stopping_takes_longer_than_draining(name: str) -> None:
    """Docker kills a service only after its drain time; compose sets only variables that the service knows."""
    ours = {key for key in SERVICES[name]["environment"] if key.startswith("CONVGRAD_")}
    assert {key.removeprefix("CONVGRAD_").lower() for key in ours} <= set(Settings.model_fields)
    grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    drain = SERVICES[name]["environment"].get("CONVGRAD_DRAIN_S", Settings.model_fields["drain_s"].default)
    assert grace >= float(drain) + 10


@pytest.mark.parametrize("name", OURS)
def test_jobs_are_kept_in_a_volume(name: str) -> None:
    """The spool is in a volume, in a folder of the image that its user owns; the replicas share one."""
    service = SERVICES[name]
    spool = re.fullmatch(r"\$\{CONVGRAD_SPOOL-(\S+)\}", service["environment"].get("CONVGRAD_SPOOL", ""))
    if name == "convgrad-ray":
        assert spool is None
        return
    assert spool
    (volume,) = service["volumes"]
    shared, _, folder = volume.partition(":")
    assert (shared, folder) == ("spool" if name == "convgrad" else "replicas-spool", spool[1])
    assert shared in COMPOSE["volumes"]
    assert re.search(rf"install -d -o convgrad .*{folder}", (ROOT / "Dockerfile").read_text("utf-8"))


@pytest.mark.parametrize("name", RAY)
def test_the_cluster_has_a_token(name: str) -> None:
    """Nodes start once there is a token; they can read it, not write it, and it is in no variable."""
    service, environment = SERVICES[name], SERVICES[name]["environment"]
    assert service["depends_on"]["ray-token"] == {"condition": "service_completed_successfully"}
    assert service["volumes"] == ["ray-token:/run/ray:ro"]
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/ray/token")
    assert "RAY_AUTH_TOKEN" not in environment


def token_made_in(folder: Path) -> str:
    """Run the command of `ray-token` on the folders `secrets` and `ray` of `folder`; return the token it leaves."""
    service = SERVICES["ray-token"]
    (text,) = service["command"]
    assert service["volumes"] == ["ray-token:/run/ray"]
    text = text.replace("$$", "$").replace("/run/secrets", f"{folder}/secrets").replace("/run/ray", f"{folder}/ray")
    subprocess.run([*service["entrypoint"], text], check=True)
    assert [path.name for path in (folder / "ray").iterdir()] == ["token"]
    assert stat.S_IMODE((folder / "ray" / "token").stat().st_mode) == 0o600
    return (folder / "ray" / "token").read_text("utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A new volume, and the secret of a fresh clone."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "secrets").mkdir()
    default = re.fullmatch(r"\$\{CONVGRAD_RAY_TOKEN_FILE:-(\S+)\}", COMPOSE["secrets"]["ray_token"]["file"])
    assert default
    (tmp_path / "secrets" / "ray_token").write_bytes((ROOT / default[1]).read_bytes())
    return tmp_path


def test_the_token(folder: Path) -> None:
    """Without a token from the user there is a random one, which stays; his replaces it, without its line break."""
    token = token_made_in(folder)
    assert re.fullmatch(r"[0-9a-f]{48}\n", token)
    assert token_made_in(folder) == token
    (folder / "ray" / "token").unlink()
    assert token_made_in(folder) != token
    secret = folder / "secrets" / "ray_token"
    secret.write_text("given\n\n", "utf-8")
    assert token_made_in(folder) == "given\n"
    secret.unlink()
    with pytest.raises(subprocess.CalledProcessError):  # one that can't be read does not become a random one
        token_made_in(folder)


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
