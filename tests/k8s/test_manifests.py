"""Manifests, rendered by the real `kubectl kustomize`: valid for several Kubernetes versions, and true to the code."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2] / "k8s"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
VERSIONS = ("1.29", "1.34", "1.37")
HANDOVER_SECONDS = 15
"""What a worker may need after its drain time; see `worker.process`."""


@cache
def objects(overlay):
    done = subprocess.run(
        [Path(sys.executable).with_name("kubectl"), "kustomize", ROOT / "overlays" / overlay],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(params=OVERLAYS)
def rendered(request):
    return objects(request.param)


def of_kind(rendered, kind):
    return [thing for thing in rendered if thing["kind"] == kind]


def pods(rendered):
    """(deployment's name, pod spec, pod labels)."""
    for deployment in of_kind(rendered, "Deployment"):
        template = deployment["spec"]["template"]
        yield deployment["metadata"]["name"], template["spec"], template["metadata"]["labels"]


def main_containers(rendered):
    for name, pod, _ in pods(rendered):
        for container in pod["containers"]:
            yield name, pod, container


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(rendered, version):
    for thing in rendered:
        kubernetes_validate.validate(thing, version, strict=True)


def test_what_is_unknown_or_misspelt_does_not_pass():
    """The check can fail."""
    deployment = dict(of_kind(objects(OVERLAYS[0]), "Deployment")[0])
    misspelt = deployment | {"spec": deployment["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, VERSIONS[-1], strict=True)
    unknown = {"apiVersion": "v1", "kind": "Podd", "metadata": {}}
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        kubernetes_validate.validate(unknown, VERSIONS[-1], strict=True)


def test_selectors_find_pods_and_ports_have_names(rendered):
    for service in of_kind(rendered, "Service"):
        selector = service["spec"]["selector"]
        chosen = [pod for _, pod, labels in pods(rendered) if selector.items() <= labels.items()]
        assert len(chosen) == 1, f"service {service['metadata']['name']} selects {len(chosen)} deployments"
        names = {port["name"]: port["containerPort"] for c in chosen[0]["containers"] for port in c["ports"]}
        for port in service["spec"]["ports"]:
            assert names[port["targetPort"]] == port["port"]
    for budget in of_kind(rendered, "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        assert any(selector.items() <= labels.items() for _, _, labels in pods(rendered))


def test_probes_ask_ports_that_are_there(rendered):
    for name, _, container in main_containers(rendered):
        ports = {port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] in ports, (name, probe)
        # Readiness is the standard's default service; only liveness is our own.
        assert "service" not in container["readinessProbe"]["grpc"]
        assert container["livenessProbe"]["grpc"]["service"] == "live"


def flag(container, name):
    [value] = [a.removeprefix(f"--{name}=") for a in container["args"] if a.startswith(f"--{name}=")]
    return value


def test_a_pod_gets_the_time_that_its_process_needs_to_end(rendered):
    for name, pod, container in main_containers(rendered):
        needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + float(flag(container, "drain-seconds"))
        needed += 0 if name.endswith("router") else HANDOVER_SECONDS
        assert pod["terminationGracePeriodSeconds"] > needed


@cache
def help_text(command):
    return subprocess.run(
        [sys.executable, "-m", "kvferry", command, "--help"], capture_output=True, text=True, check=True,
        env={"COLUMNS": "400", "PATH": "/usr/bin:/bin"},
    ).stdout  # fmt: skip


def test_every_flag_exists_and_every_variable_is_set(rendered):
    maps = {thing["metadata"]["name"]: thing["data"] for thing in of_kind(rendered, "ConfigMap")}
    for name, _, container in main_containers(rendered):
        assert container["command"][0] == "kvferry"
        known = set(re.findall(r"--[a-z][a-z-]*", help_text(container["command"][1])))
        used = {argument.partition("=")[0] for argument in container["args"]}
        assert used <= known, f"{name}: {used - known}"
        variables = {entry["name"] for entry in container["env"]}
        for source in container["envFrom"]:
            variables |= maps[source["configMapRef"]["name"]].keys()
        wanted = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert wanted <= variables, f"{name}: {wanted - variables}"


def test_routers_look_where_workers_are(rendered):
    services = {s["metadata"]["name"]: s["spec"] for s in of_kind(rendered, "Service")}
    [router] = [c for name, _, c in main_containers(rendered) if name == "kvferry-router"]
    for tier in ("prefill", "decode"):
        host, _, port = flag(router, tier).removeprefix("dns:///").partition(":")
        assert services[host]["clusterIP"] == "None", "a headless service has one address per worker"
        assert int(port) == services[host]["ports"][0]["port"]


def test_nothing_runs_as_root_or_talks_to_the_api(rendered):
    for name, pod, _ in pods(rendered):
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_all_pods_run_one_image(rendered):
    images = {c["image"] for _, pod, _ in pods(rendered) for c in [*pod["containers"], *pod.get("initContainers", [])]}
    assert len(images) == 1
    assert ":" in images.pop()


def test_a_changed_flag_is_a_rollout(rendered):
    """Names of maps carry a hash of their content."""
    for thing in of_kind(rendered, "ConfigMap"):
        assert re.fullmatch(r"kvferry-[a-z]+-[a-z0-9]{10}", thing["metadata"]["name"])
