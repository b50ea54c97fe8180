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


def quantity(text: str) -> int:
    """Return the bytes of a quantity such as ``4Gi``."""
    return int(text[:-2]) << {"Mi": 20, "Gi": 30}[text[-2:]]


both = pytest.mark.parametrize("name", ["base", "ray", "spool"])


@both
def test_manifests_are_valid(name: str) -> None:
    """What Kustomize builds passes the schemas of Kubernetes, and so do the pods of the Ray cluster."""
    manifests = built(name)
    kinds = {"Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"}
    kinds |= {"RayCluster"} if name == "ray" else {"HorizontalPodAutoscaler"}
    kinds |= {"PersistentVolumeClaim"} if name == "spool" else set()
    assert {kind for kind, _ in manifests} == kinds
    for (kind, _), manifest in manifests.items():
        if kind not in _FOREIGN:
            validate(manifest)
    for pod in pods(manifests):
        validate(pod)


@both
def test_pods_are_restricted(name: str) -> None:
    """Each container runs as a user with no rights, on a read-only root, with limits; none gets the account's token."""
    for pod in pods(built(name)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        # OpenShift assigns users and groups, and rejects pods that name their own.
        own = {"runAsUser", "runAsGroup"} | (set() if name == "spool" else {"fsGroup"})
        assert not spec["securityContext"].keys() & own
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]["limits"]) >= {"cpu", "memory"}


@both
def test_pods_have_time_to_drain(name: str) -> None:
    """Kubernetes kills a pod only after its delay, the longest call and the five seconds that uvicorn may take."""
    spec = built(name)["Deployment", "convgrad"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    ours = {name for name in values if name.startswith("CONVGRAD_")}
    assert {name.removeprefix("CONVGRAD_").lower() for name in ours} <= set(Settings.model_fields)
    drain, delay = float(values["CONVGRAD_DRAIN_S"]), float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert drain >= Settings.model_fields["deadline_s"].default
    assert spec["terminationGracePeriodSeconds"] > drain + delay + 5
    probe = container["readinessProbe"]
    assert delay > probe["periodSeconds"] * probe["failureThreshold"]


def test_pods_share_the_spool() -> None:
    """All pods run on the node of the volume, which holds the spool and more bytes than it may take."""
    (volume,) = documents(FOLDER / "spool" / "volume.yaml")
    (patch,) = documents(FOLDER / "spool" / "jobs.yaml")
    spec = patch["spec"]["template"]["spec"]
    (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    (container,) = spec["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}
    (mount,) = container["volumeMounts"]
    assert Path(mount["mountPath"]) in Path(values["CONVGRAD_SPOOL"]).parents
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    limit = Settings(spool_limit=values["CONVGRAD_SPOOL_LIMIT"]).spool_limit
    assert limit < quantity(volume["spec"]["resources"]["requests"]["storage"])


def test_rays_ports_are_closed() -> None:
    """Only the service and the nodes may connect to the Ray cluster, and the operator to its head."""
    manifests = built("ray")
    cluster = manifests["RayCluster", "convgrad-ray"]["metadata"]["name"]
    nodes, head = (manifests["NetworkPolicy", name]["spec"] for name in ("convgrad-ray", "convgrad-ray-head"))
    # KubeRay gives these two labels to every pod of a cluster.
    assert nodes["podSelector"]["matchLabels"] == {"ray.io/cluster": cluster}
    assert head["podSelector"]["matchLabels"] == {"ray.io/cluster": cluster, "ray.io/node-type": "head"}
    (rule,) = nodes["ingress"]
    service = {"podSelector": {"matchLabels": manifests["Deployment", "convgrad"]["spec"]["selector"]["matchLabels"]}}
    assert rule == {"from": [{"podSelector": nodes["podSelector"]}, service]}
    operator = {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}}
    assert head["ingress"] == [{"from": [{"namespaceSelector": {}, **operator}]}]


def test_the_object_store_has_memory() -> None:
    """A node's object store fits into its /dev/shm, which leaves memory for the processes, and /tmp into its disk."""
    manifests = built("ray")
    spec = manifests["RayCluster", "convgrad-ray"]["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    stores = [int(group["rayStartParams"]["object-store-memory"]) for group in groups]
    service, *nodes = pods(manifests)
    environment = {each["name"]: each["value"] for each in service["spec"]["containers"][0]["env"]}
    for pod, store in zip((service, *nodes), (int(environment["CONVGRAD_RAY_JOIN"]), *stores), strict=True):
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        sizes = {each["name"]: each["emptyDir"]["sizeLimit"] for each in pod["spec"]["volumes"] if "emptyDir" in each}
        assert store < quantity(sizes["shm"]) <= quantity(limits["memory"]) - quantity("2Gi")
        assert store < quantity(sizes["tmp"]) < quantity(limits["ephemeral-storage"])
