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

from rpc.addresses import normal_address
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
NEEDS = {"topology": "gpu", "network-policy": "gpu", "model-image": "none", "autoscaling-hpa-colocated": "colocated",
         "autoscaling-keda-colocated": "colocated"}  # fmt: skip
"""What components are tried on, if not on the demo; none: the base, without a model."""
OWN_MODEL = K8S / "overlays" / "own-model" / "kustomization.yaml"
PREFIX = yaml.safe_load(OWN_MODEL.read_text())["namePrefix"]


@cache
def objects(overlay):
    return list(yaml.safe_load_all(kubectl("kustomize", K8S / "overlays" / overlay).stdout))


_with_component = {}


def root_from(folder):
    return "../" * (len(folder.parts) - 1) + str(K8S).lstrip("/")


def with_components(folder, *components):
    """The demo, or what they need, with more components, as a user would add them."""
    overlay = next((NEEDS[name] for name in components if name in NEEDS), "cpu-demo")
    root = root_from(folder)
    resources = [f"{root}/base" if overlay == "none" else f"{root}/overlays/{overlay}"]
    text = {
        "resources": resources,
        "namespace": "kvferry",
        "components": [f"{root}/components/{c}" for c in components],
    }
    if overlay == "none":
        text["images"] = [{"name": "kvferry", "newTag": "cpu"}]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
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
    """(deployment's name without the prefix of overlays/own-model, pod spec, pod labels)."""
    for deployment in of_kind(rendered, "Deployment"):
        template = deployment["spec"]["template"]
        yield deployment["metadata"]["name"].removeprefix(PREFIX), template["spec"], template["metadata"]["labels"]


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
    maps = {t["metadata"]["name"]: t["data"] for t in of_kind(rendered, "ConfigMap")}
    data = {k: v for source in router["envFrom"] for k, v in maps[source["configMapRef"]["name"]].items()}
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
        assert re.fullmatch(r"kvferry-[a-z]+-[a-z0-9]{10}", name.removeprefix(PREFIX))


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


@pytest.mark.parametrize("tiers", ["", "-colocated"])
def test_both_autoscalers_follow_the_same_rules(tiers):
    hpas = list(yaml.safe_load_all((K8S / f"components/autoscaling-hpa{tiers}/hpa.yaml").read_text()))
    kedas = yaml.safe_load_all((K8S / f"components/autoscaling-keda{tiers}/scaled-objects.yaml").read_text())
    assert len(hpas) == (1 if tiers else 2)
    for hpa, keda in zip(hpas, kedas, strict=True):
        h, k = hpa["spec"], keda["spec"]
        assert hpa["metadata"]["name"] == keda["metadata"]["name"] == h["scaleTargetRef"]["name"]
        assert k["scaleTargetRef"]["name"] == h["scaleTargetRef"]["name"]
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


def test_one_tier_is_scaled_by_the_needs_of_both():
    """The same series and targets, and decode's pace."""

    def specs(component):
        return [hpa["spec"] for hpa in yaml.safe_load_all((K8S / "components" / component / "hpa.yaml").read_text())]

    prefill, decode = specs("autoscaling-hpa")
    [colocated] = specs("autoscaling-hpa-colocated")
    assert colocated["metrics"] == prefill["metrics"] + decode["metrics"]
    assert colocated["behavior"] == decode["behavior"]


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


TWO_TIERS, ONE_TIER = "base", "base/one-tier"
OTHERS = ["monitoring", "ingress", "mtls"]
"""Go with everything."""
COMBINATIONS = {
    "keda": (TWO_TIERS, ["model-claim", "gpu", "topology", "rdma", "autoscaling-keda", "network-policy", *OTHERS]),
    "hpa": (TWO_TIERS, ["model-image", "gpu", "autoscaling-hpa", "network-policy", *OTHERS]),
    "processors": (TWO_TIERS, ["model-prepare", "autoscaling-keda", *OTHERS]),
    "one-tier-keda": (
        ONE_TIER,
        ["model-claim", "gpu", "rdma", "autoscaling-keda-colocated", "network-policy", *OTHERS],
    ),
    "one-tier-hpa": (ONE_TIER, ["model-prepare", "gpu", "topology", "autoscaling-hpa-colocated", *OTHERS]),
}
"""As a user may choose them in a copy of overlays/own-model: together they have every component."""
TLS_NAME = "kvferry"


def own_model(folder, tiers, components, namespace="team-x", name="pre", **changes):
    """A copy of overlays/own-model that a user changed, written; see `kubectl kustomize`."""
    root = root_from(folder)
    text = yaml.safe_load(OWN_MODEL.read_text())
    workers = ["kvferry-colocated"] if tiers == ONE_TIER else ["kvferry-prefill", "kvferry-decode"]
    text |= {
        "namespace": namespace,
        "namePrefix": f"{name}-",
        "resources": [f"{root}/{tiers}"],
        "components": [f"{root}/components/{component}" for component in components],
        "transformers": [f"{root}/transformers"],
        "replicas": [{"name": worker, "count": 3} for worker in workers],
    }
    text["labels"][0]["pairs"] = {"app.kubernetes.io/instance": name}
    if "gpu" not in components:
        text["patches"] = [patch for patch in text["patches"] if "nvidia.com" not in patch["patch"]]
    text = {key: value for key, value in (text | changes).items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return folder


@pytest.fixture(scope="module", params=COMBINATIONS)
def own(request, tmp_path_factory):
    folder = own_model(tmp_path_factory.mktemp(request.param), *COMBINATIONS[request.param])
    return list(yaml.safe_load_all(kubectl("kustomize", folder).stdout))


def test_the_combinations_have_every_component():
    assert {name for _, components in COMBINATIONS.values() for name in components} == set(COMPONENTS)
    named = re.findall(r"[a-z-]+", OWN_MODEL.read_text())
    assert set(COMPONENTS) <= set(named), "a user finds each in the file"


def test_own_combinations_are_valid(own):
    for thing in own:
        validate(thing, VERSIONS[-1])


def strings(value, path=()):
    """(path, string) of every string in an object; elements of a list have the list's path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner, path)
    elif isinstance(value, str):
        yield path, value


def is_meant(kind, path, text):
    """Where an unprefixed "kvferry" is no name of an object."""
    return (
        path[-1].startswith("app.kubernetes.io/")  # labels, the same in every copy
        or (path[-1] == "command" and text == "kvferry")
        or text.startswith(("/tmp/kvferry", "kvferry.dev/"))
        or (kind == "ConfigMap" and path[-1] in ("dashboard.json", "config.yaml"))  # series
        or (kind == "PrometheusRule" and path[-1] in ("expr", "record", "name") and "groups" in path)  # series
        or path[-1] == "query"  # its namespace has a test
        or (kind == "HorizontalPodAutoscaler" and path[-2:] == ("metric", "name"))
        or (kind == "Certificate" and (path[-1] == "commonName" or (path[-1] == "dnsNames" and text == TLS_NAME)))
        or text == "kvferry-hub"  # the user's own Secrets
        or (kind == "Ingress" and (path[-1] in ("hosts", "host") or text == "kvferry-ingress"))
    )


def stale(rendered, prefix="pre-"):
    """(object, path, string) of names without their prefix."""
    return [
        (f"{thing['kind']}/{thing['metadata']['name']}", ".".join(path), text)
        for thing in rendered
        for path, text in strings(thing)
        if re.search(rf"(?<!{prefix})\bkvferry", text.replace("registry.example.com/team/kvferry:", ""))
        and not is_meant(thing["kind"], path, text)
    ]


def test_a_prefix_and_a_namespace_reach_everything(own):
    assert stale(own) == []
    assert {thing["metadata"]["namespace"] for thing in own} == {"team-x"}
    queries = [text for thing in own for path, text in strings(thing) if path[-1] == "query" and "max(" in text]
    assert len(queries) == (3 if of_kind(own, "ScaledObject") else 0)
    for query in queries:
        assert re.fullmatch(r'max\(kvferry:[a-z_]+\{namespace="team-x"\}\)', query)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("ScaledObject", "name: pre-kvferry-decode", "name: kvferry-decode"),
        ("ConfigMap", "DECODE: pre-kvferry-decode", "DECODE: kvferry-decode"),
        ("Certificate", "pre-kvferry.team-x.svc", "kvferry.kvferry.svc"),
        ("Issuer", "secretName: pre-kvferry-ca", "secretName: kvferry-ca"),
        ("Deployment", "secretName: pre-kvferry-worker-tls", "secretName: kvferry-worker-tls"),
    ],
)
def test_a_name_that_stayed_behind_is_found(tmp_path, kind, old, new):
    """The check can fail."""
    text = kubectl("kustomize", own_model(tmp_path / "copy", *COMBINATIONS["keda"])).stdout
    assert old in text
    assert kind in {found.partition("/")[0] for found, _, _ in stale(list(yaml.safe_load_all(text.replace(old, new))))}


def test_without_the_transformers_names_stay_behind(tmp_path):
    """What the last lines of overlays/own-model are for."""
    folder = own_model(tmp_path / "copy", *COMBINATIONS["keda"], transformers=None)
    rendered = list(yaml.safe_load_all(kubectl("kustomize", folder).stdout))
    assert {path for _, path, _ in stale(rendered)} == {"spec.dnsNames"}
    assert 'namespace="kvferry"' in str(of_kind(rendered, "ScaledObject"))


def test_what_refers_to_an_object_finds_it(own):
    names = {(thing["kind"], thing["metadata"]["name"]) for thing in own}
    for scaler in of_kind(own, "ScaledObject") + of_kind(own, "HorizontalPodAutoscaler"):
        assert ("Deployment", scaler["spec"]["scaleTargetRef"]["name"]) in names
    for ingress in of_kind(own, "Ingress"):
        [path] = ingress["spec"]["rules"][0]["http"]["paths"]
        assert ("Service", path["backend"]["service"]["name"]) in names
    certificates = of_kind(own, "Certificate")
    secrets = {certificate["spec"]["secretName"] for certificate in certificates}
    assert {certificate["spec"]["issuerRef"]["name"] for certificate in certificates} == {
        issuer["metadata"]["name"] for issuer in of_kind(own, "Issuer")
    }
    assert {issuer["spec"]["ca"]["secretName"] for issuer in of_kind(own, "Issuer") if "ca" in issuer["spec"]} < secrets
    for _, pod, _ in pods(own):
        [tls] = [volume["secret"]["secretName"] for volume in pod["volumes"] if volume["name"] == "tls"]
        assert tls in secrets


def test_certificates_are_for_our_name_and_the_routers_service(own):
    [service] = [
        s["metadata"]
        for s in of_kind(own, "Service")
        if s["spec"]["selector"]["app.kubernetes.io/component"] == "router"
    ]
    host = f"{service['name']}.{service['namespace']}.svc"
    names = {c["metadata"]["name"]: c["spec"].get("dnsNames") for c in of_kind(own, "Certificate")}
    assert names == {
        "pre-kvferry-ca": None,
        "pre-kvferry-worker-tls": [TLS_NAME],
        "pre-kvferry-router-tls": [TLS_NAME, host, f"{host}.cluster.local"],
    }


def test_the_name_in_certificates_is_the_one_that_is_asked_for():
    from rpc import tls

    assert tls.TLS_NAME == TLS_NAME


def test_routers_of_a_copy_look_where_its_workers_are(own):
    services = {s["metadata"]["name"]: s["spec"] for s in of_kind(own, "Service")}
    maps = {t["metadata"]["name"]: t["data"] for t in of_kind(own, "ConfigMap")}
    [router] = [c for _, _, c in main_containers(own) if c["name"] == "router"]
    data = {k: v for source in router["envFrom"] for k, v in maps[source["configMapRef"]["name"]].items()}
    addresses = {
        tier: re.sub(r"\$\((\w+)\)", lambda match: data[match[1]], argument.partition("=")[2])
        for argument in router["args"]
        for tier in ("prefill", "decode", "colocated")
        if argument.startswith(f"--{tier}=")
    }
    tiers = {"colocated"} if "pre-kvferry-colocated" in services else {"prefill", "decode"}
    assert addresses == {tier: f"dns:///pre-kvferry-{tier}:7000" for tier in tiers}
    for tier in tiers:
        assert services[f"pre-kvferry-{tier}"]["selector"]["app.kubernetes.io/component"] == tier


def test_what_is_scaled_has_no_replicas_though_the_overlay_sets_them(own):
    scaled = {
        scaler["spec"]["scaleTargetRef"]["name"]
        for scaler in of_kind(own, "ScaledObject") + of_kind(own, "HorizontalPodAutoscaler")
    }
    deployments = {d["metadata"]["name"]: d["spec"] for d in of_kind(own, "Deployment")}
    assert scaled == deployments.keys() - {"pre-kvferry-router"}
    assert [name for name, spec in deployments.items() if "replicas" in spec] == ["pre-kvferry-router"]


def test_a_token_goes_to_what_fetches_and_nowhere_else(own):
    for thing in own:
        spec = thing["spec"]["template"]["spec"] if thing["kind"] in ("Deployment", "Job") else {}
        fetching = spec.get("initContainers", []) + (spec.get("containers", []) if thing["kind"] == "Job" else [])
        others = spec.get("containers", []) if thing["kind"] == "Deployment" else []
        secrets = {v["name"]: v["secret"] for v in spec.get("volumes", []) if "secret" in v}
        for container in fetching:
            [path] = [e["value"] for e in container["env"] if e["name"] == "HF_TOKEN_PATH"]
            [mount] = [m for m in container["volumeMounts"] if path == f"{m['mountPath']}/HF_TOKEN"]
            assert secrets[mount["name"]]["secretName"] == "kvferry-hub"
            assert secrets[mount["name"]]["optional"] is True, "models that need no token"
        for container in others:
            assert "HF_TOKEN" not in str(container)


def matches(selector, labels):
    """As Kubernetes selects; only what our manifests use."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
    )


def selectors(rendered):
    """(where, selector) of all selectors of pods of our own."""
    for thing in rendered:
        spec, name = thing.get("spec", {}), f"{thing['kind']}/{thing['metadata']['name']}"
        match thing["kind"]:
            case "Service":
                yield name, {"matchLabels": spec["selector"]}
            case "Deployment":
                yield name, spec["selector"]
                for constraint in spec["template"]["spec"]["topologySpreadConstraints"]:
                    yield f"{name} spread", constraint["labelSelector"]
                affinity = spec["template"]["spec"].get("affinity", {}).get("podAffinity", {})
                for preferred in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", []):
                    yield f"{name} affinity", preferred["podAffinityTerm"]["labelSelector"]
            case "PodDisruptionBudget" | "PodMonitor":
                yield name, spec["selector"]
            case "NetworkPolicy":
                yield name, spec["podSelector"]
                for side, peers in (("ingress", "from"), ("egress", "to")):
                    for peer in (peer for rule in spec.get(side, []) for peer in rule.get(peers, [])):
                        if "namespaceSelector" not in peer and "kvferry.dev/client" not in str(peer):
                            yield f"{name} {side}", peer["podSelector"]


def neighbours(tmp_path, **changes):
    """Two copies in one namespace, rendered."""
    return [
        list(
            yaml.safe_load_all(
                kubectl("kustomize", own_model(tmp_path / n, *COMBINATIONS["keda"], name=n, **changes)).stdout
            )
        )
        for n in ("one", "two")
    ]


def meetings(mine, theirs):
    """(selector, deployment) of selectors of one copy that find pods of the other."""
    return [
        (where, name)
        for where, selector in selectors(mine)
        for name, _, labels in pods(theirs)
        if matches(selector, labels)
    ]


def test_two_models_in_a_namespace_stay_apart(tmp_path):
    one, two = neighbours(tmp_path)
    assert not {(t["kind"], t["metadata"]["name"]) for t in one} & {(t["kind"], t["metadata"]["name"]) for t in two}
    assert meetings(one, two) == meetings(two, one) == []
    found = meetings(one, one)
    assert {where.split("/")[0] for where, _ in found} == {
        "Service", "Deployment", "PodDisruptionBudget", "PodMonitor", "NetworkPolicy",
    }  # fmt: skip
    assert "Deployment/one-kvferry-decode affinity" in dict(found)
    # Every selector finds a deployment of its own, but for the policy of the job that fetches the model.
    assert {where for where, _ in selectors(one)} - {where for where, _ in found} == {"NetworkPolicy/one-kvferry-model"}


def test_with_a_prefix_alone_they_do_not(tmp_path):
    """Why overlays/own-model sets a label too."""
    assert ("Service/one-kvferry-decode", "two-kvferry-decode") in meetings(*neighbours(tmp_path, labels=None))


def test_whoever_is_not_ours_is_named_as_before(tmp_path):
    """A label that goes into selectors must not go into those of clients and of the cluster's DNS."""
    [one, _] = neighbours(tmp_path)
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(one, "NetworkPolicy")}
    [namespaces, clients] = policies["one-kvferry-clients"]["ingress"][0]["from"]
    assert matches(clients["podSelector"], {"kvferry.dev/client": "true"})
    assert namespaces == {"namespaceSelector": {"matchLabels": {"kvferry.dev/clients": "true"}}}
    [dns] = policies["one-kvferry-router"]["egress"][1]["to"]
    assert matches(dns["podSelector"], {"k8s-app": "kube-dns"})
    assert not matches(dns["podSelector"], {"k8s-app": "other"})


GPU_PATCH = [patch for patch in yaml.safe_load(OWN_MODEL.read_text())["patches"] if "nvidia.com" in patch["patch"]]
MISTAKES = {
    "decode is scaled, and there is one tier": (ONE_TIER, ["autoscaling-keda"], {}, "Deployment.*kvferry-prefill"),
    "decode is scaled by an HPA, and there is one tier": (
        ONE_TIER,
        ["autoscaling-hpa"],
        {},
        "Deployment.*kvferry-prefill",
    ),
    "one tier is scaled, and there are two": (TWO_TIERS, ["autoscaling-keda-colocated"], {}, "Deployment.*colocated"),
    "one tier is scaled by an HPA, and there are two": (
        TWO_TIERS,
        ["autoscaling-hpa-colocated"],
        {},
        "Deployment.*colocated",
    ),
    "two autoscalers": (TWO_TIERS, ["autoscaling-hpa", "autoscaling-keda"], {}, "/spec/replicas"),
    "a claim, and fetched by pods": (TWO_TIERS, ["model-claim", "model-prepare"], {}, "model-prepare.*emptyDir failed"),
    "fetched by pods, and an image": (
        TWO_TIERS,
        ["model-prepare", "model-image"],
        {},
        "model-image.*initContainers failed",
    ),
    "fetched by pods, and a claim": (
        TWO_TIERS,
        ["model-prepare", "model-claim"],
        {},
        "model-claim.*initContainers failed",
    ),
    "an image, and fetched by pods": (
        TWO_TIERS,
        ["model-image", "model-prepare"],
        {},
        "model-prepare.*emptyDir failed",
    ),
    "an image and a claim": (TWO_TIERS, ["model-image", "model-claim"], {}, "model-claim.*emptyDir failed"),
    "a claim and an image": (TWO_TIERS, ["model-claim", "model-image"], {}, "model-image.*emptyDir failed"),
    "pods fetch, and have no network": (
        TWO_TIERS,
        ["model-prepare", "network-policy"],
        {},
        "network-policy.*initContainers",
    ),
    "pods have no network, and fetch": (TWO_TIERS, ["network-policy", "model-prepare"], {}, "network-policy excludes"),
    "ingress after mtls": (TWO_TIERS, ["mtls", "ingress"], {}, "ingress comes before"),
    "gpu after rdma": (TWO_TIERS, ["rdma", "gpu"], {}, "components/gpu.*rdma"),
    "a kind of GPU without gpu": (TWO_TIERS, [], {"patches": GPU_PATCH}, "nodeSelector"),
    "replicas of a tier that is not there": (
        ONE_TIER,
        [],
        {"replicas": [{"name": "kvferry-decode", "count": 1}]},
        "kvferry-decode",
    ),
    "no namespace": (TWO_TIERS, [], {"namespace": None}, "metadata.namespace"),
}
"""Tiers, components, further changes; what kustomize's error names."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_can_not_work_is_not_rendered(tmp_path, mistake):
    tiers, components, changes, said = MISTAKES[mistake]
    done = kubectl("kustomize", own_model(tmp_path / "copy", tiers, components, **changes), check=False)
    assert done.returncode != 0
    assert re.search(said, done.stderr), done.stderr


def test_two_copies_without_a_prefix_are_refused_together(tmp_path):
    for name in ("one", "two"):
        own_model(tmp_path / name, TWO_TIERS, ["model-claim", "gpu"], name=name, namePrefix=None)
    (tmp_path / "kustomization.yaml").write_text("resources: [one, two]")
    done = kubectl("kustomize", tmp_path, check=False)
    assert done.returncode != 0
    assert "already registered id" in done.stderr


def choices():
    """Lines of overlays/own-model that are comments to be taken away."""
    return re.findall(r"^  # - \.\./\.\./components/([a-z-]+)", OWN_MODEL.read_text(), re.M)


@pytest.mark.parametrize("name", choices())
def test_every_choice_of_the_file_can_be_made(tmp_path, name):
    """The comment sign taken away, in the text as it is."""
    text = OWN_MODEL.read_text().replace(f"  # - ../../components/{name} ", f"  - ../../components/{name} ")
    text = text.replace(f"  # - ../../components/{name}\n", f"  - ../../components/{name}\n")
    if name.startswith("model-"):
        text = text.replace("  - ../../components/model-claim", "  # ../../components/model-claim")
    if name.startswith("autoscaling-keda"):
        at = text.index("  # - target:")
        text = (
            text[:at]
            + re.sub(r"^  # ", "  ", text[at : text.index("# Last:")], flags=re.M)
            + text[text.index("# Last:") :]
        )
    (tmp_path / "kustomization.yaml").write_text(text.replace("../../", f"{root_from(tmp_path)}/"))
    rendered = list(yaml.safe_load_all(kubectl("kustomize", tmp_path).stdout))
    for thing in rendered:
        validate(thing, VERSIONS[-1])
    references = [v["image"]["reference"] for _, pod, _ in pods(rendered) for v in pod["volumes"] if "image" in v]
    assert set(references) == ({"registry.example.com/team/qwen3-8b:1"} if name == "model-image" else set())
    if name == "autoscaling-keda":
        assert "prometheus.example:9090" in str(of_kind(rendered, "ScaledObject"))


def test_own_settings_arrive(tmp_path):
    rendered = objects("own-model")
    [claim] = of_kind(rendered, "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "shared-files"
    assert claim["spec"]["resources"]["requests"]["storage"] == "40Gi"
    for name, pod, container in main_containers(rendered):
        assert container["image"] == "registry.example.com/team/kvferry:gpu-1"
        product = pod.get("nodeSelector", {}).get("nvidia.com/gpu.product")
        assert product == (None if name == "kvferry-router" else "NVIDIA-H200")
    [account] = of_kind(rendered, "ServiceAccount")
    assert account["imagePullSecrets"] == [{"name": "registry"}]
    [common] = [t["data"] for t in of_kind(rendered, "ConfigMap") if "MODEL" in t["data"]]
    assert common["MODEL"] == common["MODEL_SOURCE"] == "Qwen/Qwen3-8B"
    [job] = of_kind(rendered, "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example.com/team/kvferry:gpu-1"
    assert not of_kind(rendered, "Namespace"), "`kubectl delete -k` would take everything in it"


def test_the_table_of_the_documentation_names_every_component_that_is_refused():
    text = (K8S.parent / "docs" / "kubernetes.md").read_text()
    table = text[text.index("### What does not go together") :].split("\n## ")[0]
    for _, components, _, _ in MISTAKES.values():
        for component in components:
            assert f"`{component}`" in table, component


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_processes_listen_where_pods_have_addresses(tmp_path, host):
    """One line for a cluster with IPv6 only. Kubernetes gives a pod its address without brackets."""
    text = OWN_MODEL.read_text()
    line = '- "HOST=::"\n'
    assert f"      # {line}" in text
    if host == "::":
        text = text.replace(f"      # {line}", f"      {line}")
    (tmp_path / "kustomization.yaml").write_text(text.replace("../../", f"{root_from(tmp_path)}/"))
    rendered = list(yaml.safe_load_all(kubectl("kustomize", tmp_path).stdout))
    [common] = [t["data"] for t in of_kind(rendered, "ConfigMap") if "HOST" in t["data"]]
    assert common["HOST"] == host
    for _, _, container in main_containers(rendered):
        assert flag(container, "host") == "$(HOST)"
    assert normal_address("fd00:10:244::5:7000") == "[fd00:10:244::5]:7000"
