"""The Kubernetes manifests: valid by the schemas of Kubernetes, and with what a service under load needs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from app.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
KUBECTL = shutil.which("kubectl")
# Parts of these are not of Kubernetes itself, or of its API.
_FOREIGN = {"Kustomization", "RayCluster"}


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a file."""
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def validate(manifest: dict[str, Any]) -> None:
    """Check a manifest with the schema of its kind, refusing unknown fields."""
    pytest.importorskip("kubernetes_validate", reason="needs the extra [deploy]").validate(
        manifest, "1.37", strict=True
    )


def built(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what `kubectl kustomize` makes of a folder, by kind and name."""
    if KUBECTL is None:
        pytest.skip("needs kubectl")
    text = subprocess.run([KUBECTL, "kustomize", str(FOLDER / name)], check=True, capture_output=True, text=True).stdout
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def pods(manifests: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pod templates of deployments and Ray clusters, each as a Pod."""
    templates = []
    for (kind, _), manifest in manifests.items():
        if kind == "Deployment":
            templates.append(manifest["spec"]["template"])
        elif kind == "RayCluster":
            groups = [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]
            templates += [group["template"] for group in groups]
    return [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_are_listed(path: Path) -> None:
    """Each file is a resource or a patch of the Kustomization beside it."""
    (kustomization,) = documents(path.with_name("kustomization.yaml"))
    patches = [patch.get("path") for patch in kustomization.get("patches", [])]
    assert path.name in ["kustomization.yaml", *kustomization["resources"], *patches]


@pytest.mark.parametrize("name", ["base", "ray"])
def test_manifests_are_valid(name: str) -> None:
    """What Kustomize builds passes the schemas of Kubernetes, and so do the pods of the Ray cluster."""
    manifests = built(name)
    assert {kind for kind, _ in manifests} >= {
        "Deployment",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
    }
    for (kind, _), manifest in manifests.items():
        if kind not in _FOREIGN:
            validate(manifest)
    for pod in pods(manifests):
        validate(pod)


def test_an_unknown_field_is_invalid() -> None:
    """The check refuses what Kubernetes would drop."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"prots": []}}
    with pytest.raises(Exception, match="prots"):
        validate(service)


@pytest.mark.parametrize("name", ["base", "ray"])
def test_pods_are_restricted(name: str) -> None:
    """Each container runs as a user with no rights, on a read-only root, with limits; none gets the account's token."""
    for pod in pods(built(name)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]["limits"]) >= {"cpu", "memory"}


@pytest.mark.parametrize("name", ["base", "ray"])
def test_pods_have_time_to_drain(name: str) -> None:
    """Kubernetes kills a pod only after its delay, its drain time and the five seconds that uvicorn may take."""
    spec = built(name)["Deployment", "convgrad"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    drain, delay = float(values["CONVGRAD_DRAIN_S"]), float(values["CONVGRAD_DRAIN_DELAY_S"])
    assert spec["terminationGracePeriodSeconds"] > drain + delay + 5
    probe = container["readinessProbe"]
    assert delay > probe["periodSeconds"] * probe["failureThreshold"]


def test_variables_are_settings() -> None:
    """The deployment sets only variables that the service knows."""
    (deployment,) = documents(FOLDER / "base" / "deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    names = {each["name"].removeprefix("CONVGRAD_").lower() for each in container["env"]}
    assert names <= set(Settings.model_fields)


def test_rays_ports_are_closed() -> None:
    """Only the service, the nodes and the operator may connect to the Ray cluster, by labels that these pods have."""
    manifests = built("ray")
    (rule,) = manifests["NetworkPolicy", "convgrad-ray"]["spec"]["ingress"]
    names = [each["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for each in rule["from"]]
    assert names == ["convgrad-ray", "convgrad", "kuberay-operator"]
    assert [pod["metadata"]["labels"]["app.kubernetes.io/name"] for pod in pods(manifests)] == [
        "convgrad",
        "convgrad-ray",
        "convgrad-ray",
    ]
