"""The demo, applied by the real kubectl, with every pod as real processes: it serves, scales, rolls and ends.

One cluster for all tests, in the order of its life. Clients ask all the time; no request may fail, whatever is done.
`make test-k8s` runs it: about 2 minutes on 2 cores.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading

import httpx
import psutil
import pytest
import yaml

from kvferry.client import Client
from tests.chaos.load import OPTIONS, Load
from tests.k8s.api_server import api_server
from tests.k8s.cluster import Cluster, link_model
from tests.k8s.tools import K8S, kubectl

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TIERS = ("prefill", "decode", "router")


class Demo:
    """The overlay with flags of a test's own, the cluster it runs on, and its clients."""

    def __init__(self, folder, store, kubeconfig, cluster):
        self.folder, self.store, self.kubeconfig, self.cluster = folder, store, kubeconfig, cluster
        self.flags = {"common": {"DTYPE": "float32"}}
        self.load = None

    def kustomize(self):
        """Writes a kustomization on top of the overlay, as a user would for flags of their own."""
        (self.folder / "k").mkdir(exist_ok=True)
        overlay = "../" * len(self.folder.parts) + str(K8S / "overlays" / "cpu-demo").lstrip("/")
        generators = [
            {"name": f"kvferry-{name}", "behavior": "merge", "literals": [f"{k}={v}" for k, v in flags.items()]}
            for name, flags in self.flags.items()
        ]
        text = {"resources": [overlay], "namespace": "kvferry", "configMapGenerator": generators}
        (self.folder / "k" / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return self.folder / "k"

    def kubectl(self, *arguments, **options):
        return kubectl(*arguments, kubeconfig=self.kubeconfig, **options)

    def apply(self):
        return self.kubectl("apply", "-k", self.kustomize())

    def wait_rolled_out(self, *tiers):
        for tier in tiers:
            self.kubectl(
                "-n", "kvferry", "rollout", "status", f"deployment/kvferry-{tier}", "--timeout=120s", timeout=150
            )

    def scale(self, tier, replicas):
        self.kubectl("-n", "kvferry", "scale", f"deployment/kvferry-{tier}", f"--replicas={replicas}")
        name = f"kvferry-{tier}"
        self.cluster.wait_for(
            lambda: [p.is_ready for p in self.cluster.pods_of(name)] == [True] * replicas, what=f"{replicas} of {name}"
        )

    @property
    def address(self):
        return self.cluster.address("kvferry", 50051)

    def start_clients(self):
        prompts = [[random.randrange(2, 300) for _ in range(n)] for n in (5, 40, 90, 150)]
        self.load = Load(self.address, prompts, max_tokens=24)
        self._stop_load, self._loop = asyncio.Event(), asyncio.new_event_loop()

        def run():
            self._loop.run_until_complete(self.load.learn())
            self._loop.run_until_complete(self.load.run(3, self._stop_load))

        self._clients = threading.Thread(target=run, daemon=True)
        self._clients.start()
        self.cluster.wait_for(lambda: len(self.load.done) > 10, what="first answers")

    def wait_for_answers(self, number):
        """That many more."""
        wanted = len(self.load.done) + number
        self.cluster.wait_for(lambda: len(self.load.done) >= wanted, what="answers")

    def stop_clients(self):
        self._loop.call_soon_threadsafe(self._stop_load.set)
        self._clients.join(60)
        assert not self._clients.is_alive()


@pytest.fixture(scope="module")
def demo(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("cluster")
    models = link_model(tiny_model("llama"), folder / "node-models")
    # Pages over TCP, so that their connections can be seen; shared memory has none.
    with (
        api_server(folder) as (store, kubeconfig),
        Cluster(store, folder, models, environment={"UCX_TLS": "tcp"}) as cluster,
    ):
        yield Demo(folder, store, kubeconfig, cluster)


@pytest.fixture(autouse=True)
def _clients_are_content(demo):
    yield
    if demo.load is not None:
        assert demo.load.lost == []
        assert demo.load.wrong == []
    assert demo.cluster.errors == []


def test_it_comes_up_and_serves(demo):
    assert "created" in demo.apply().stdout
    demo.wait_rolled_out(*TIERS)
    with Client(demo.address) as client:
        result = client.generate([5, 6, 7, 8] * 20, max_tokens=5, **OPTIONS).result()
    assert len(result.token_ids) == 5
    assert result.kv_transfer.bytes > 0
    models = httpx.get(f"http://{demo.cluster.address('kvferry', 8000)}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["smollm2-135m-instruct"]


def test_applying_again_changes_nothing(demo):
    assert changed_by(demo.apply()) == []
    assert demo.kubectl("diff", "-k", demo.kustomize(), check=False).returncode == 0


def changed_by(applied):
    """Kinds that kubectl changed. It calls disruption budgets configured each time: their selectors are replaced."""
    lines = [line for line in applied.stdout.splitlines() if not line.startswith("poddisruptionbudget")]
    return sorted(line.split("/")[0] for line in lines if not line.endswith("unchanged"))


def test_a_misspelt_field_is_refused_and_nothing_is_changed(demo):
    broken = demo.folder / "broken.yaml"
    broken.write_text(yaml.safe_dump(demo.store.get("Service", "kvferry", "kvferry") | {"spek": {}}))
    refused = demo.kubectl("apply", "-f", broken, check=False)
    assert refused.returncode == 1
    assert "spek" in refused.stderr


def metric_names(text):
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}


def test_every_metric_that_is_looked_at_is_exported(demo):
    exported = set()
    for tier in TIERS:
        [pod] = demo.cluster.pods_of(f"kvferry-{tier}")
        exported |= metric_names(httpx.get(f"http://{pod.address}:9090/metrics").text)
    wanted = set()
    for path in sorted((K8S / "components").rglob("*")):
        if path.suffix in (".yaml", ".json"):
            text = path.read_text()
            wanted |= set(re.findall(r"\bkvferry_[a-z_]+", text)) if path.parent.name == "monitoring" else set()
    recorded = {rule["record"] for rule in recording_rules()}
    used = set()
    for path in sorted((K8S / "components").rglob("*")):
        if path.is_file():
            used |= set(re.findall(r"kvferry:[a-z_]+", path.read_text()))
    assert len(wanted) > 15
    assert wanted <= exported
    assert used <= recorded | {"kvferry:cpu", "kvferry:gpu"}


def recording_rules():
    [rules] = yaml.safe_load_all((K8S / "components" / "monitoring" / "rules.yaml").read_text())
    return [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "record" in rule]


def test_network_policies_allow_every_flow_and_no_other(demo):
    """Connections that pods have while clients are served, against what the policies say."""
    demo.start_clients()
    seen = set()
    for _ in range(20):
        seen |= flows(demo.cluster)
        demo.wait_for_answers(1)
    # An owner of pages calls its writer only when something has failed.
    seen |= {("decode", "prefill", "grpc")}
    allowed = policy_flows()
    assert seen <= allowed
    either_way = {("decode", "prefill", "pages"), ("prefill", "decode", "pages")}
    assert seen & either_way
    assert seen | either_way == allowed


def flows(cluster):
    """(tier that connects, tier that listens, kind of port) of all connections between pods."""
    owners, listening, connected = {}, {}, []
    for pod in list(cluster.pods):
        if pod.process is None:
            continue
        tier = pod.deployment.removeprefix("kvferry-")
        try:
            for c in psutil.Process(pod.process.pid).net_connections(kind="tcp"):
                if c.status == psutil.CONN_LISTEN:
                    listening[c.laddr.port, tier] = pod.name
                    owners.setdefault(c.laddr.port, set()).add((pod.name, tier, c.laddr.ip))
                elif c.status == psutil.CONN_ESTABLISHED:
                    connected.append((pod.name, tier, c.laddr, c.raddr))
        except psutil.NoSuchProcess:
            continue
    found = set()
    for name, tier, local, remote in connected:
        if any(owner == name for owner, _, _ in owners.get(local.port, ())):
            continue  # it is the one that listens
        for owner, target, ip in owners.get(remote.port, ()):
            if owner != name and ip in (remote.ip, "0.0.0.0", "::"):
                found.add((tier, target, kind_of_port(remote.port)))
    return found


def kind_of_port(port):
    return {7000: "grpc", 9090: "metrics", 50051: "grpc", 8000: "http"}.get(port) or (
        "pages" if 7100 <= port <= 7199 else f"port {port}"
    )


def policy_flows():
    """(from, to, kind of port) that both an egress and an ingress rule allow, between our own pods."""
    policies = list(yaml.safe_load_all((K8S / "components/network-policy/policies.yaml").read_text()))
    sides = {"ingress": set(), "egress": set()}
    for policy in policies:
        for side, peers in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(side, []):
                for ours in tiers_of(policy["spec"]["podSelector"]):
                    for peer in rule.get(peers, []):
                        if "namespaceSelector" in peer or "kvferry.dev/client" in str(peer):
                            continue
                        for other in tiers_of(peer["podSelector"]):
                            pair = (other, ours) if side == "ingress" else (ours, other)
                            sides[side] |= {(*pair, kind) for port in rule["ports"] for kind in kinds(port)}
    both = sides["ingress"] & sides["egress"]
    return {flow for flow in both if "colocated" not in flow}


def tiers_of(selector):
    component = selector.get("matchLabels", {}).get("app.kubernetes.io/component")
    named = [e["values"] for e in selector.get("matchExpressions", []) if e["key"] == "app.kubernetes.io/component"]
    return [component] if component else [tier for values in named for tier in values] or [*TIERS, "colocated"]


def kinds(port):
    value, end = port["port"], port.get("endPort")
    if end is not None:
        return {"pages" if (value, end) == (7100, 7199) else f"ports {value} to {end}"}
    return {value} if isinstance(value, str) else {{7000: "grpc"}.get(value, f"port {value}")}


@pytest.mark.parametrize("tier", ["decode", "prefill"])
def test_a_tier_scales_up_and_down_under_load(demo, tier):
    before = len(demo.cluster.ended)
    demo.scale(tier, 2)
    demo.wait_for_answers(10)
    demo.scale(tier, 1)
    # Which of both is ended is the controller's choice.
    demo.cluster.wait_for(lambda: len(demo.cluster.ended) > before, what="the end of one")
    assert demo.cluster.ended[-1].deployment == f"kvferry-{tier}"


@pytest.mark.parametrize(
    ("tier", "flags"),
    [
        ("decode", {"DECODE_ADMISSION": "full"}),
        ("prefill", {"TOKEN_BUDGET": "64"}),
        ("router", {"MAX_QUEUE_REQUESTS": "500"}),
    ],
)
def test_new_flags_roll_out_under_load(demo, tier, flags):
    [old] = demo.cluster.pods_of(f"kvferry-{tier}")
    demo.flags[tier] = flags
    assert changed_by(demo.apply()) == ["configmap", "deployment.apps"]
    demo.wait_rolled_out(tier)
    demo.cluster.wait_for(lambda: old in demo.cluster.ended, what=f"the end of {old.name}")
    [new] = demo.cluster.pods_of(f"kvferry-{tier}")
    assert new.name != old.name
    demo.wait_for_answers(5)


def test_a_pod_that_is_deleted_costs_nothing(demo):
    pod = random.choice(list(demo.cluster.pods))
    demo.kubectl("-n", "kvferry", "delete", "pod", pod.name, "--wait=false")
    demo.cluster.wait_for(lambda: pod in demo.cluster.ended, what=f"the end of {pod.name}")
    demo.wait_rolled_out(*TIERS)
    demo.wait_for_answers(5)


def pages_of(pod):
    """Pages by owner, and of the pool."""
    text = httpx.get(f"http://{pod.address}:9090/metrics").text
    samples = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    owners = {re.search('owner="(.*?)"', k)[1]: v for k, v in samples.items() if k.startswith("kvferry_pages{")}
    [total] = [v for k, v in samples.items() if k.startswith("kvferry_pages_total{")]
    [moved] = [v for k, v in samples.items() if k.startswith("kvferry_kv_bytes_total{")]
    return owners, total, moved


def test_afterwards_no_page_is_held_and_all_add_up(demo):
    demo.stop_clients()
    [prefill], [decode] = (demo.cluster.pods_of(f"kvferry-{tier}") for tier in ("prefill", "decode"))
    assert pages_of(prefill)[2] > 0, "pages were moved"
    for pod in (prefill, decode):
        demo.cluster.wait_for(
            lambda pod=pod: all(pages_of(pod)[0][owner] == 0 for owner in ("held", "pinned", "quarantined")), seconds=5
        )
        owners, total, _ = pages_of(pod)
        assert sum(owners.values()) == total


def test_at_the_end_every_process_has_ended_well(demo):
    demo.kubectl("delete", "-k", demo.kustomize(), "--wait=false")
    demo.cluster.wait_for(lambda: not demo.cluster.pods, what="the end of all pods")
    assert demo.store.list("Deployment") == []
    for pod in demo.cluster.ended:
        assert pod.restarts == 0, pod.name
        assert set(pod.exit_codes) == {0}, (pod.name, pod.exit_codes, pod.log()[-3000:])
        assert not pod.killed
    assert len(demo.cluster.ended) >= 9
