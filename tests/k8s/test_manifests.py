"""Manifests, rendered by the real `kubectl kustomize`: valid for several Kubernetes versions, and true to the code."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.k8s.autoscaler import parse
from tests.k8s.schemas import validate
from tests.k8s.tools import COMPONENTS, K8S, OVERLAYS, kubectl

VERSIONS = ("1.29", "1.34", "1.37")
HANDOVER_SECONDS = 15
"""What a worker may need after its drain time; see `worker.process`."""
ONLY_NEWER = {"model-image": "1.34"}  # with a gate; 1.35 without
"""Components with fields that older versions do not know."""
IN_OVERLAYS = {"gpu", "rdma", "model-prepare", "model-claim"}
"""Components that overlays have; others are for users to add."""


@cache
def objects(overlay):
    return list(yaml.safe_load_all(kubectl("kustomize", K8S / "overlays" / overlay).stdout))


_with_component = {}


def with_components(folder, *components):
    """The demo, or the GPU overlay for what needs one, with more components, as a user would add them."""
    overlay = "gpu" if {"topology", "network-policy"} & set(components) else "cpu-demo"
    up = "../" * (len(folder.parts) - 1)
    root = up + str(K8S).lstrip("/")
    text = {"resources": [f"{root}/overlays/{overlay}"], "namespace": "kvferry"}
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump(text | {"components": [f"{root}/components/{name}" for name in components]})
    )
    return list(yaml.safe_load_all(kubectl("kustomize", folder).stdout))


@pytest.fixture(params=[*OVERLAYS, *(f"+{name}" for name in COMPONENTS if name not in IN_OVERLAYS)])
def rendered(request, tmp_path_factory):
    if not request.param.startswith("+"):
        return objects(request.param)
    name = request.param[1:]
    if name not in _with_component:
        _with_component[name] = with_components(tmp_path_factory.mktemp(name), name)
    return _with_component[name]


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
def test_every_object_is_valid(rendered, version, request):
    component = request.node.callspec.params["rendered"].lstrip("+")
    if version < ONLY_NEWER.get(component, version):
        pytest.skip(f"{component} is for {ONLY_NEWER[component]} or newer, as it says")
    for thing in rendered:
        validate(thing, version)


def test_what_is_unknown_or_misspelt_does_not_pass():
    """The check can fail."""
    deployment = dict(of_kind(objects(OVERLAYS[0]), "Deployment")[0])
    misspelt = deployment | {"spec": deployment["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(misspelt, VERSIONS[-1])
    unknown = {"apiVersion": "v1", "kind": "Podd", "metadata": {}}
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        validate(unknown, VERSIONS[-1])
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": {}, "spec": {"selectr": {}}}
    with pytest.raises(jsonschema.ValidationError):
        validate(monitor, VERSIONS[-1])


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
        assert flag(container, "drain-seconds") == "$(DRAIN_SECONDS)"
        [common] = [t["data"] for t in of_kind(rendered, "ConfigMap") if "DRAIN_SECONDS" in t["data"]]
        needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + float(common["DRAIN_SECONDS"])
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
        assert name == f"kvferry-{container['command'][1]}"
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
    [data] = [t["data"] for t in of_kind(rendered, "ConfigMap") if "PREFILL" in t["data"]]
    tiers = {name.removeprefix("kvferry-") for name, _, _ in pods(rendered)} - {"router"}
    assert tiers in ({"prefill", "decode"}, {"colocated"})
    for tier in tiers:
        value = re.sub(r"\$\((\w+)\)", lambda match: data[match[1]], flag(router, tier))
        host, _, port = value.removeprefix("dns:///").partition(":")
        assert services[host]["clusterIP"] == "None", "a headless service has one address per worker"
        assert int(port) == services[host]["ports"][0]["port"]


def test_nothing_runs_as_root_or_talks_to_the_api(rendered, request):
    is_rdma = request.node.callspec.params["rendered"] == "gpu-rdma"
    for name, pod, _ in pods(rendered):
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            # Memory that a network card writes to must stay where it is; nothing else is asked for.
            pinned = {"add": ["IPC_LOCK"]} if is_rdma and name != "kvferry-router" else {}
            assert context["capabilities"] == {"drop": ["ALL"]} | pinned
            assert "memory" in container["resources"]["limits"]


def test_all_pods_run_one_image(rendered):
    images = {c["image"] for _, pod, _ in pods(rendered) for c in [*pod["containers"], *pod.get("initContainers", [])]}
    assert len(images) == 1
    assert ":" in images.pop()


def test_a_changed_flag_is_a_rollout(rendered):
    """Names of maps that pods read carry a hash of their content."""
    used = {s["configMapRef"]["name"] for _, _, c in main_containers(rendered) for s in c["envFrom"]}
    assert len(used) >= 3
    for name in used:
        assert re.fullmatch(r"kvferry-[a-z]+-[a-z0-9]{10}", name)


def test_every_worker_of_the_gpu_overlays_gets_its_gpu():
    for overlay, count in (("gpu", 2), ("gpu-rdma", 2), ("colocated", 1)):
        workers = [(p, c) for name, p, c in main_containers(objects(overlay)) if name != "kvferry-router"]
        assert len(workers) == count
        for pod, container in workers:
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
            assert "--device=cuda" in container["args"]
            assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
            assert ("--require-rdma" in container["args"]) == (overlay == "gpu-rdma")
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_baseline_has_as_many_gpus_and_the_same_settings():
    def gpus(overlay):
        replicas = {d["metadata"]["name"]: d["spec"]["replicas"] for d in of_kind(objects(overlay), "Deployment")}
        return sum(
            replicas[name] * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
            for name, _, container in main_containers(objects(overlay))
        )

    def settings(overlay):
        maps = [t["data"] for t in of_kind(objects(overlay), "ConfigMap")]
        return {name: data[name] for data in maps for name in data if name in ("TOKEN_BUDGET", "PAGE_SIZE", "DTYPE")}

    assert gpus("gpu") == gpus("colocated") == 4
    assert settings("gpu") == settings("colocated")


def test_quantities_parse(rendered):
    for _, pod, _ in pods(rendered):
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            for values in container["resources"].values():
                for name, value in values.items():
                    assert re.fullmatch(r"\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?", str(value)), (name, value)
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert quantity(requests["memory"]) <= quantity(limits["memory"])


def quantity(text):
    number, unit = re.fullmatch(r"([\d.]+)(m|Ki|Mi|Gi|Ti)?", str(text)).groups()
    return float(number) * {"m": 1e-3, None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


def test_scalers_find_what_they_scale_and_do_not_fight_with_apply(rendered):
    deployments = {d["metadata"]["name"]: d["spec"] for d in of_kind(rendered, "Deployment")}
    scaled = set()
    for scaler in of_kind(rendered, "HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        assert 1 <= spec["minReplicas"] <= spec["maxReplicas"]
        scaled.add(spec["scaleTargetRef"]["name"])
    for scaler in of_kind(rendered, "ScaledObject"):
        spec = scaler["spec"]
        assert 1 <= spec["minReplicaCount"] <= spec["maxReplicaCount"]
        scaled.add(spec["scaleTargetRef"]["name"])
    for name in scaled:
        assert "replicas" not in deployments[name]
    for name in deployments.keys() - scaled:
        assert deployments[name]["replicas"] >= 1


def test_both_autoscalers_follow_the_same_rules():
    hpas = yaml.safe_load_all((K8S / "components/autoscaling-hpa/hpa.yaml").read_text())
    kedas = yaml.safe_load_all((K8S / "components/autoscaling-keda/scaled-objects.yaml").read_text())
    for hpa, keda in zip(hpas, kedas, strict=True):
        h, k = hpa["spec"], keda["spec"]
        assert hpa["metadata"]["name"] == keda["metadata"]["name"] == h["scaleTargetRef"]["name"]
        assert (h["minReplicas"], h["maxReplicas"]) == (k["minReplicaCount"], k["maxReplicaCount"])
        assert h["behavior"] == k["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        for metric, trigger in zip(h["metrics"], k["triggers"], strict=True):
            external = metric["external"]
            name = external["metric"]["name"].replace("kvferry_", "kvferry:", 1)
            assert trigger["metadata"]["query"] == f'max({name}{{namespace="kvferry"}})'
            assert trigger["metadata"]["ignoreNullValues"] == "false", "no data must not look like no load"
            target = external["target"]
            assert trigger["metricType"] == target["type"]
            assert float(trigger["metadata"]["threshold"]) == parse(target.get("averageValue") or target["value"])


def test_the_adapter_gives_the_names_that_the_autoscalers_ask_for():
    [adapter] = yaml.safe_load_all((K8S / "components/autoscaling-hpa/prometheus-adapter.yaml").read_text())
    [rule] = yaml.safe_load(adapter["data"]["config.yaml"])["externalRules"]
    pattern, template = rule["name"]["matches"], rule["name"]["as"]
    rules = yaml.safe_load((K8S / "components/monitoring/rules.yaml").read_text())
    records = [r["record"] for group in rules["spec"]["groups"] for r in group["rules"] if "record" in r]
    given = {re.sub(pattern, template.replace("${1}", r"\1"), record) for record in records}
    hpas = yaml.safe_load_all((K8S / "components/autoscaling-hpa/hpa.yaml").read_text())
    assert {m["external"]["metric"]["name"] for hpa in hpas for m in hpa["spec"]["metrics"]} <= given


SHAPES = {
    "SmolLM2 135M": (30, 3, 64),
    "Qwen2.5 7B": (28, 4, 128),
    "Llama 3.1 8B": (32, 8, 128),
    "Qwen3 8B": (36, 8, 128),
    "Mistral Nemo 12B": (40, 8, 128),
}
"""Layers, KV heads, head size."""


def test_the_table_of_sizes_follows_its_formulas():
    text = (K8S.parent / "docs" / "kubernetes.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    seen = {row[0]: row[1:] for row in rows if row[0] in SHAPES}
    assert seen.keys() == SHAPES.keys()
    for name, (layers, heads, size) in SHAPES.items():
        per_token = layers * 2 * heads * size * 2
        weights = float(seen[name][2].removesuffix(" GB")) * 1e9
        pages = int((0.85 * 80e9 - weights - 3e9) / (16 * per_token))
        assert seen[name][0] == f"{per_token:,}"
        assert seen[name][1] == f"{16 * per_token / 1e6:.2f} MB"
        assert seen[name][3] == f"{pages:,} ({pages * 16:,})"
        assert seen[name][4] == f"{per_token * 8 * 10_000 / 1e9:.1f} Gbit/s"


def test_with_mtls_whatever_is_in_front_speaks_tls(tmp_path):
    rendered = with_components(tmp_path, "ingress", "mtls")
    protocols = {
        (service["metadata"]["name"], port["name"]): port.get("appProtocol")
        for service in of_kind(rendered, "Service")
        for port in service["spec"]["ports"]
    }
    assert protocols["kvferry", "http"] == "https"
    assert not {"http", "kubernetes.io/h2c"} & set(protocols.values())
    key = "nginx.ingress.kubernetes.io/backend-protocol"
    backends = {i["metadata"]["name"]: i["metadata"]["annotations"][key] for i in of_kind(rendered, "Ingress")}
    assert backends == {"kvferry-grpc": "GRPCS", "kvferry-http": "HTTPS"}
