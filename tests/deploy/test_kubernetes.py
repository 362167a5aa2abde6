"""The manifests, checked without a cluster: schemas, references, and values that must equal those of the code."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.label_utils import validate_node_label_syntax
from ray.serve.schema import ServeDeploySchema

from cluster.local_ray import SERVE_ENV
from cluster.logs import CONTAINER_ENV
from cluster.node import NODE_LABEL, node_labels
from cluster.nodes import GIB, Card, Node
from loadtests.balancer import DEPLOY
from serve_app.app import ModelArgs, Share, deploy_config
from serve_app.deployment import deployment_options
from serve_app.settings import Settings

FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.30", "1.37")

# Fields of KubeRay 1.6's RayService that a manifest may set. The API server drops or refuses all other fields.
SERVICE_FIELDS = {"upgradeStrategy", "excludeHeadPodFromServeSvc", "serveConfigV2", "rayClusterConfig", "serveService"}
CLUSTER_FIELDS = {"rayVersion", "authOptions", "gcsFaultToleranceOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_FIELDS = {"rayStartParams", "template", "labels", "resources", "serviceType"}
WORKER_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "labels", "resources"}
REDIS_FIELDS = {"redisAddress", "redisUsername", "redisPassword", "externalStorageNamespace"}

# The machines of the worker groups, and their compute capability.
MACHINES = {
    "rtx-5080": (Node("a", "amd64", 64 * GIB, 16, (Card("NVIDIA GeForce RTX 5080", 16 * GIB),)), (12, 0)),
    "gb10": (Node("b", "arm64", 121 * GIB, 20, (Card("NVIDIA GB10", 121 * GIB, unified=True),)), (12, 1)),
}


class StrictLoader(yaml.SafeLoader):
    """Raises an error for two equal keys. YAML's own loader silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key stands twice in {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.load_all((FOLDER / name).read_text(), StrictLoader))


KUSTOMIZATION = documents("kustomization.yaml")[0]
RESOURCES = [document for name in KUSTOMIZATION["resources"] for document in documents(name)]
SERVICE = next(each for each in RESOURCES if each["kind"] == "RayService")["spec"]
CLUSTER = SERVICE["rayClusterConfig"]
WORKERS = CLUSTER["workerGroupSpecs"]
RAY_PODS = [group["template"] for group in (CLUSTER["headGroupSpec"], *WORKERS)]
SERVE_CONFIG = yaml.load(SERVICE["serveConfigV2"], StrictLoader)


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in RESOURCES if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def values(content: Any, key: str) -> Iterator[Any]:
    """The values of `key` at any depth."""
    if isinstance(content, dict):
        if key in content:
            yield content[key]
        content = list(content.values())
    for each in content if isinstance(content, list) else ():
        yield from values(each, key)


def test_every_file_belongs_to_the_kustomization() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"kustomization.yaml", *KUSTOMIZATION["resources"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_kubernetes_schema(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    plain = [each for each in RESOURCES if each["kind"] != "RayService"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"} | pod["metadata"], "spec": pod["spec"]}
        for pod in RAY_PODS
    ]
    assert len(plain) == 5
    for document in (*plain, *pods):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_ray_service_uses_only_fields_that_kuberay_has() -> None:
    assert set(SERVICE) <= SERVICE_FIELDS
    assert set(CLUSTER) <= CLUSTER_FIELDS
    assert set(CLUSTER["authOptions"]) <= {"mode", "secretName"}
    assert set(CLUSTER["gcsFaultToleranceOptions"]) <= REDIS_FIELDS
    assert set(CLUSTER["headGroupSpec"]) <= HEAD_FIELDS
    assert SERVICE["upgradeStrategy"] == {"type": "None"}
    for group in WORKERS:
        assert set(group) <= WORKER_FIELDS
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert "labels" not in group["rayStartParams"], "KubeRay refuses labels there"
    for group in (CLUSTER["headGroupSpec"], *WORKERS):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert set(group["template"]) <= {"metadata", "spec"}


def test_kustomize_builds_it_with_the_images_put_in() -> None:
    command = next((each for each in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(each[0])), None)
    if command is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    env = os.environ | {"KUBECONFIG": os.devnull}  # the commands must not reach a cluster
    done = subprocess.run([*command, str(FOLDER)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.load_all(done.stdout, StrictLoader))
    assert len(built) == len(RESOURCES)
    assert {each["metadata"]["namespace"] for each in built} == {KUSTOMIZATION["namespace"]}
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in KUSTOMIZATION["images"]}
    (service,) = [each["spec"]["rayClusterConfig"] for each in built if each["kind"] == "RayService"]
    for group in (service["headGroupSpec"], *service["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert spec["containers"][0]["image"] == images[f"emberforge-{spec['nodeSelector']['kubernetes.io/arch']}"]
        assert spec["containers"][0]["livenessProbe"]["httpGet"]


def test_the_environment_is_what_the_code_sets() -> None:
    ours = SERVE_ENV | CONTAINER_ENV
    lines = "\n".join(f"  {name}: {json.dumps(value)}" for name, value in ours.items())
    assert find("ConfigMap", "emberforge-environment")["data"] == ours, f"environment.yaml must hold\n{lines}"
    for pod in RAY_PODS:
        assert pod["spec"]["containers"][0]["envFrom"] == [{"configMapRef": {"name": "emberforge-environment"}}]


def test_every_secret_is_made_by_a_command_of_the_guide() -> None:
    guide = (DEPLOY.parents[1] / "docs" / "operate" / "kubernetes.md").read_text()
    made = set(re.findall(r"-n (\S+) create secret generic (\S+) --from-literal=(\w+)=", guide))
    used = {(each["name"], each["key"]) for each in values(RESOURCES, "secretKeyRef")}
    used.add((CLUSTER["authOptions"]["secretName"], "auth_token"))  # KubeRay's name for the key
    assert {(KUSTOMIZATION["namespace"], *each) for each in used} == made
    assert CLUSTER["authOptions"]["mode"] == "token"


def test_what_is_referred_to_is_there() -> None:
    redis = find("Deployment", "emberforge-redis")["spec"]
    pod = redis["template"]
    labels = pod["metadata"]["labels"]
    service = find("Service", "emberforge-redis")["spec"]
    assert redis["selector"]["matchLabels"].items() <= labels.items()
    assert service["selector"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    (port,) = service["ports"]
    assert CLUSTER["gcsFaultToleranceOptions"]["redisAddress"] == f"emberforge-redis:{port['port']}"
    assert ports[port["targetPort"]] == 6379  # redis-server's default port
    for claim in values(RESOURCES, "claimName"):
        find("PersistentVolumeClaim", claim)
    budget = find("PodDisruptionBudget", "emberforge-workers")["spec"]["selector"]["matchLabels"].items()
    assert [budget <= each["metadata"]["labels"].items() for each in RAY_PODS] == [False, True, True]
    for spec in (each["spec"] for each in (*RAY_PODS, pod)):
        container = spec["containers"][0]
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes
        names = {port["name"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            for port in values(container[probe], "port"):
                assert isinstance(port, int) or port in names


def test_no_probe_needs_a_program_that_the_image_lacks() -> None:
    """Without probes in the manifest, KubeRay adds its own probes, which need wget."""
    for pod in RAY_PODS:
        container = pod["spec"]["containers"][0]
        assert "httpGet" in container["readinessProbe"]
        assert "httpGet" in container["livenessProbe"]


@pytest.mark.parametrize("group", WORKERS, ids=lambda group: str(group["groupName"]))
def test_a_worker_group_says_of_its_machines_what_they_would_say(group: dict[str, Any]) -> None:
    expected = node_labels(*MACHINES[group["groupName"]])
    spec = group["template"]["spec"]
    container = spec["containers"][0]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    own = json.loads(environment["RAY_OVERRIDE_LABELS"].replace("$(NODE_NAME)", expected[NODE_LABEL]))
    assert group["labels"] | own == expected
    validate_node_label_syntax(group["labels"] | own)
    assert list(environment).index("NODE_NAME") < list(environment).index("RAY_OVERRIDE_LABELS")
    assert spec["nodeSelector"]["kubernetes.io/arch"] == group["labels"]["emberforge-arch"]
    assert container["image"] == f"emberforge-{group['labels']['emberforge-arch']}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_stopping_pod_waits_for_its_replicas() -> None:
    """Serve begins to stop replicas before the deadline, so that their requests in flight can end."""
    drain_s = deployment_options(Settings())["graceful_shutdown_timeout_s"]
    for group in WORKERS:
        spec = group["template"]["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
        deadline, sleep = (int(each) for each in re.findall(r"--deadline-remaining-seconds (\d+); sleep (\d+)$", command)[0])
        assert drain_s < deadline < sleep < spec["terminationGracePeriodSeconds"]


def test_the_serve_config_is_one_that_we_write() -> None:
    (application,) = SERVE_CONFIG["applications"]
    (deployment,) = application["deployments"]
    places = {name: deployment.pop(name) for name in ("num_replicas", "max_replicas_per_node")}
    share = Share(num_threads=1, num_cpus=1, num_gpus=1.0, max_surge_percent=0)
    (ours,) = (written := deploy_config(Settings(), share))["applications"]
    assert ours["deployments"][0].pop("num_replicas") == 1
    assert written == SERVE_CONFIG
    assert places == {"num_replicas": sum(group["replicas"] for group in WORKERS), "max_replicas_per_node": 1}
    ServeDeploySchema.model_validate(SERVE_CONFIG)
    ModelArgs.model_validate(application["args"])


def test_ray_is_the_version_of_the_image() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert f"ray=={CLUSTER['rayVersion']}" in constraints
