"""The compose file: what each profile starts, and what can be reached from outside."""

from __future__ import annotations

import re
import stat
import subprocess
from collections import Counter
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
    assert started("cluster") == {"ray-token", *RAY}
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
    assert bool(ports) is (name not in {"replica-1", "replica-2", "ray-token", "ray-head", "ray-worker"})


def test_internal_networks() -> None:
    """Replicas and nodes are in networks that do not reach the outside, and in no others; the token is made in none."""
    assert SERVICES["ray-token"]["network_mode"] == "none"
    assert all(COMPOSE["networks"][name]["internal"] for name in ("replicas", "metrics", "cluster"))
    assert {name: SERVICES[name]["networks"] for name in ("replica-1", "replica-2", "ray-head", "ray-worker")} == {
        "replica-1": ["replicas", "metrics"],
        "replica-2": ["replicas", "metrics"],
        "ray-head": ["cluster"],
        "ray-worker": ["cluster"],
    }


def test_forwarded_addresses_are_believed_from_nginx_alone() -> None:
    """The replicas trust the addresses of a network that only they and nginx are in."""
    subnet = SERVICES["replica-1"]["environment"]["FORWARDED_ALLOW_IPS"]
    assert COMPOSE["networks"]["replicas"]["ipam"]["config"] == [{"subnet": subnet}]
    assert {name for name, each in SERVICES.items() if "replicas" in each.get("networks", [])} == {
        "nginx",
        "replica-1",
        "replica-2",
    }


def test_nobody_can_log_in_to_grafana() -> None:
    """There is no administrator with a default password beside the anonymous access."""
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"


@pytest.mark.parametrize("name", OURS)
def test_stopping_takes_longer_than_draining(name: str) -> None:
    """Docker kills a service only after its drain time."""
    grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    drain = SERVICES[name]["environment"].get("CONVGRAD_DRAIN_S", Settings.model_fields["drain_s"].default)
    assert grace >= float(drain) + 10


@pytest.mark.parametrize("name", ["replica-1", "replica-2"])
def test_replicas_finish_the_longest_call(name: str) -> None:
    """A replica that is restarted has time for every call that it accepted, and so has nginx."""
    assert float(SERVICES[name]["environment"]["CONVGRAD_DRAIN_S"]) >= Settings.model_fields["deadline_s"].default
    assert SERVICES["nginx"]["stop_grace_period"] == SERVICES[name]["stop_grace_period"]


def test_each_image_is_built_by_one_service() -> None:
    """No two services build the same tag, which they would do at the same time, and every image of ours is built."""
    built = Counter(service["image"] for service in SERVICES.values() if "build" in service)
    assert built == {"convgrad": 1, "convgrad-ray": 1}
    assert {service["image"] for name, service in SERVICES.items() if name in (*OURS, *RAY)} == set(built)


@pytest.mark.parametrize("profile", [None, "replicas", "cluster"])
def test_a_profile_builds_its_images(profile: str | None) -> None:
    """Whatever `docker compose --profile NAME up -d` starts of ours, it also builds."""
    names = started(profile) | started(None)
    built = {SERVICES[name]["image"] for name in names if "build" in SERVICES[name]}
    assert {image for name in names if (image := SERVICES[name]["image"]).startswith("convgrad")} <= built


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


def test_a_fresh_clone_makes_its_own_token(folder: Path) -> None:
    """Without a token from the user there is a random one, which stays."""
    token = token_made_in(folder)
    assert re.fullmatch(r"[0-9a-f]{48}\n", token)
    assert token_made_in(folder) == token
    (folder / "ray" / "token").unlink()
    assert token_made_in(folder) != token


def test_a_given_token_wins(folder: Path) -> None:
    """The token of the user replaces the random one, without the line break of its file."""
    token_made_in(folder)
    (folder / "secrets" / "ray_token").write_text("given\n\n", "utf-8")
    assert token_made_in(folder) == "given\n"


def test_a_secret_that_cannot_be_read_is_an_error(folder: Path) -> None:
    """A token that is given and can't be read does not become a random one."""
    (folder / "secrets" / "ray_token").unlink()
    with pytest.raises(subprocess.CalledProcessError):
        token_made_in(folder)


@pytest.mark.parametrize(("name", "port"), [("ray-head", "--port=6379"), ("ray-worker", "--node-manager-port=6380")])
def test_nodes_are_checked(name: str, port: str) -> None:
    """`up --wait` waits until the port of a node is open; the image's own check would ask for a service."""
    service = SERVICES[name]
    assert port in (service["entrypoint"] if name == "ray-head" else service["environment"]["NODE"].split())
    assert f"(socket.gethostname(), {port.partition('=')[2]})" in service["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", RAY)
def test_a_lost_head_is_noticed_soon(name: str) -> None:
    """A node gives its head up before Ray's default of a minute, and is then started again."""
    assert float(SERVICES[name]["environment"]["RAY_gcs_rpc_server_reconnect_timeout_s"]) <= 10
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_the_number_of_nodes_is_no_setting() -> None:
    """How many nodes are started and into how many units calls are cut are two variables; the second is the setting."""
    assert SERVICES["ray-worker"]["deploy"]["replicas"] == "${CONVGRAD_RAY_NODES:-2}"
    assert "ray_nodes" not in Settings.model_fields
    environment = SERVICES["convgrad-ray"]["environment"]
    for name in ("RAY_WORKERS", "RAY_AWAY", "RAY_MIXED"):
        assert environment[f"CONVGRAD_{name}"] == f"${{CONVGRAD_{name}:-}}"
    assert environment["CONVGRAD_WORKERS"] == "${CONVGRAD_WORKERS:-1}"


@pytest.mark.parametrize("name", OURS)
def test_variables_are_settings(name: str) -> None:
    """Compose sets only variables that the service knows."""
    ours = {key for key in SERVICES[name]["environment"] if key.startswith("CONVGRAD_")}
    assert {key.removeprefix("CONVGRAD_").lower() for key in ours} <= set(Settings.model_fields)


def test_every_variable_is_explained() -> None:
    """docs/running.md has a row for each variable that docker-compose.yml takes, with its default, and no others."""
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    page = (ROOT / "docs" / "running.md").read_text("utf-8")
    table = page.partition("### Variables of compose")[2].partition("\n#")[0]
    taken: dict[str, set[str]] = {}
    for variable, default in re.findall(r"\$\{(CONVGRAD_\w+):-([^}]*)\}", text):
        taken.setdefault(variable, set()).add(default)
    rows = dict(re.findall(r"^\| `(CONVGRAD_\w+)` \|([^|]*)\|", table, re.MULTILINE))
    assert {name: set(re.findall(r"`([^`]+)`", cell)) for name, cell in rows.items()} == {
        name: defaults - {""} for name, defaults in taken.items()
    }


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
