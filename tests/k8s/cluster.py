"""Deployments as processes: a controller and a kubelet over the in-memory API server.

Each pod has an address of its own on loopback (127.77.x.y, x by test process), so that its ports are its own. A
container is its real command as a local process, with the variables, flags and folders that its manifest says. What
differs from a node: paths below a volume's mount are replaced by the volume's folder, and `--host=0.0.0.0` by the pod's
address.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.model_store import MANIFEST
from tests.k8s.api_server import ApiError

TURN_SECONDS = 0.1
POD_SITE = Path(__file__).parent / "pod_site"


class Probe:
    """A gRPC probe of a container, asked when its time has come."""

    def __init__(self, spec, address):
        self._spec, self._address = spec, address
        self._next = time.monotonic() + spec.get("initialDelaySeconds", 0)
        self.failures = 0
        self.passes = None  # not known yet

    def turn(self):
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._spec.get("periodSeconds", 10)
        request = health_pb2.HealthCheckRequest(service=self._spec["grpc"].get("service", ""))
        try:
            with grpc.insecure_channel(f"{self._address}:{self._spec['grpc']['port']}") as channel:
                reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=self._spec.get("timeoutSeconds", 1))
            ok = reply.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.RpcError:
            ok = False
        self.failures = 0 if ok else self.failures + 1
        if ok:
            self.passes = True
        elif self.failures >= self._spec.get("failureThreshold", 3):
            self.passes = False


class Pod:
    """One pod's life, in a thread of its own: init containers, the container with its probes, the end."""

    def __init__(self, cluster, deployment, name, template, address):
        self.cluster, self.deployment, self.name, self.address = cluster, deployment, name, address
        self.spec, self.labels = template["spec"], template["metadata"]["labels"]
        self.folder = cluster.folder / name
        self.folder.mkdir()
        self.is_ready, self.is_ending, self.has_ended = False, threading.Event(), False
        self.restarts = 0
        self.exit_codes = []
        self.killed = False
        """Its grace period was not enough."""
        self.process = None
        self._volumes = {v["name"]: self._make_volume(v) for v in self.spec.get("volumes", [])}
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    def end(self):
        """As `kubectl delete pod`: preStop, SIGTERM, and SIGKILL after the grace period."""
        self.is_ready = False
        self.is_ending.set()

    def join(self, timeout):
        self._thread.join(timeout)

    def log(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def _make_volume(self, volume):
        if volume["name"] == "model":
            return self.cluster.models  # prepared models that this "node" has already
        folder = self.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True)
        return folder

    def _live(self):
        try:
            for container in self.spec.get("initContainers", []):
                if self.is_ending.is_set():
                    return
                self.process = self._spawn(container)
                while self.process.poll() is None and not self.is_ending.wait(TURN_SECONDS):
                    pass
                if self.is_ending.is_set():
                    self.process.kill()  # nothing of it is worth waiting for
                    self.process.wait()
                    return
                self.exit_codes.append(self.process.returncode)
                assert self.process.returncode == 0, f"an init container of {self.name} failed: {self.log()[-2000:]}"
            [container] = self.spec["containers"]
            while not self.is_ending.is_set():
                self._run(container)
                if not self.is_ending.is_set():
                    self.restarts += 1
                    time.sleep(1)
        finally:
            self.is_ready = False
            self.has_ended = True

    def _run(self, container):
        """Runs the container until its process ends, by itself, by its liveness probe, or with the pod."""
        self.process = process = self._spawn(container)
        startup, readiness, liveness = (
            Probe(container[kind], self.address) for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        while process.poll() is None and not self.is_ending.wait(TURN_SECONDS):
            if not startup.passes:
                startup.turn()
                if startup.passes is False:
                    process.kill()
            else:
                readiness.turn()
                liveness.turn()
                self.is_ready = readiness.passes is True and not self.is_ending.is_set()
                if liveness.passes is False:
                    process.kill()
        self.is_ready = False
        if self.is_ending.is_set() and process.poll() is None:
            self._terminate(container, process)
        self.exit_codes.append(process.wait())

    def _terminate(self, container, process):
        end = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        time.sleep(container["lifecycle"]["preStop"]["sleep"]["seconds"])
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.killed = True
            process.kill()

    def _spawn(self, container):
        variables = self._variables(container)
        arguments = [
            self._to_local(_expand(argument, variables), container).replace("--host=0.0.0.0", f"--host={self.address}")
            for argument in [*container["command"], *container.get("args", [])]
        ]
        program = Path(sys.executable).with_name(arguments[0])  # the image's PATH
        own = {name: self._to_local(value, container) for name, value in variables.items()}
        environment = own | {
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "PYTHONPATH": f"{POD_SITE}:{self.cluster.pythonpath}",
            "TEST_CLUSTER_DNS": str(self.cluster.names_file),
            "OMP_NUM_THREADS": "1",
            **self.cluster.environment,
        }
        with (self.folder / f"{container['name']}-{self.restarts}.log").open("w") as log:
            return subprocess.Popen(
                [program, *arguments[1:]], env=environment, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def _variables(self, container):
        """As the API says: maps first, then single variables, which may refer to those before them."""
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        variables = {}
        for source in container.get("envFrom", []):
            variables |= self.cluster.store.get("ConfigMap", self.cluster.namespace, source["configMapRef"]["name"])[
                "data"
            ]
        for entry in container.get("env", []):
            value = entry.get("value", "")
            if "valueFrom" in entry:
                value = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            variables[entry["name"]] = _expand(value, variables)
        return variables

    def _to_local(self, text, container):
        """A path below a volume's mount, in the volume's folder."""
        folders = {mount["mountPath"]: self._volumes[mount["name"]] for mount in container.get("volumeMounts", [])}
        # All at once: a folder may itself lie where another one is mounted.
        places = "|".join(map(re.escape, sorted(folders, key=len, reverse=True)))
        return re.sub(rf"(^|=)({places})(?=/|$)", lambda match: f"{match[1]}{folders[match[2]]}", text)


def _expand(text, variables):
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


class Cluster:
    """Controller, kubelet and cluster DNS of one namespace, turned by a thread."""

    def __init__(self, store, folder, models, namespace="kvferry", environment=None):
        """models: folder that pods get as their model volume. environment: added to every container's."""
        self.store, self.folder, self.models, self.namespace = store, folder, models, namespace
        self.environment = environment or {}
        self.pythonpath = Path(__file__).parents[2]
        self.names_file = folder / "names.json"
        self.names_file.write_text("{}")
        self.pods = []
        self.ended = []
        self.errors = []
        self.proxies = {}
        self._addresses = iter(range(2, 250))
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        for pod in self.pods:
            pod.end()
        for pod in self.pods:
            pod.join(10)
            if pod.process is not None and pod.process.poll() is None:
                os.killpg(pod.process.pid, signal.SIGKILL)
        for proxy in self.proxies.values():
            proxy.close()

    def address(self, service, port):
        """Of a Service with an address of its own: what forwards each connection to one of its ready pods."""
        with self._lock:
            if (service, port) not in self.proxies:
                self.proxies[service, port] = ServiceProxy(lambda: self._ready(service), port)
            return self.proxies[service, port].address

    def pods_of(self, deployment):
        with self._lock:
            return [pod for pod in self.pods if pod.deployment == deployment and not pod.is_ending.is_set()]

    def wait_for(self, condition, seconds=120, what="what the test waits for"):
        end = time.monotonic() + seconds
        while not condition():
            assert not self.errors, self.errors
            assert time.monotonic() < end, f"{what} did not come:\n" + self.describe()
            time.sleep(0.05)

    def describe(self):
        return "\n".join(
            f"{pod.name} ready={pod.is_ready} restarts={pod.restarts} codes={pod.exit_codes}\n{pod.log()[-1500:]}"
            for pod in [*self.pods, *self.ended]
        )

    # the turning

    def _run(self):
        while not self._stop.wait(TURN_SECONDS):
            try:
                with self._lock:
                    self._turn()
            except ApiError:
                continue  # deleted meanwhile
            except Exception as error:
                self.errors.append(repr(error))

    def _turn(self):
        for pod in [pod for pod in self.pods if pod.has_ended]:
            self.pods.remove(pod)
            self.ended.append(pod)
            with contextlib.suppress(ApiError):
                self.store.delete("Pod", self.namespace, pod.name)
        known = {pod["metadata"]["name"] for pod in self.store.list("Pod", self.namespace)}
        for pod in self.pods:
            if pod.name not in known and not pod.is_ending.is_set():
                pod.end()  # deleted
        deployments = {d["metadata"]["name"]: d for d in self.store.list("Deployment", self.namespace)}
        for name, deployment in deployments.items():
            self._reconcile(name, deployment)
        for pod in self.pods:
            if pod.deployment not in deployments and not pod.is_ending.is_set():
                pod.end()
        self._publish_names()

    def _reconcile(self, name, deployment):
        """One turn of a rolling update, within its surge and its availability."""
        spec = deployment["spec"]
        template = spec["template"]
        revision = sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]
        wanted, rolling = spec.get("replicas", 1), spec["strategy"]["rollingUpdate"]
        pods = [pod for pod in self.pods if pod.deployment == name and not pod.is_ending.is_set()]
        new = [pod for pod in pods if pod.revision == revision]
        old = [pod for pod in pods if pod.revision != revision]
        if len(new) < wanted and len(pods) < wanted + rolling["maxSurge"]:
            self._start_pod(name, template, revision)
        for pod in sorted(new, key=lambda pod: pod.is_ready)[: max(0, len(new) - wanted)]:
            pod.end()
        num_ready = sum(pod.is_ready for pod in pods)
        for pod in old:
            if not pod.is_ready or num_ready - 1 >= wanted - rolling["maxUnavailable"]:
                num_ready -= pod.is_ready
                pod.end()
        self._tell_status(deployment, [p for p in pods if not p.is_ending.is_set()], revision, wanted)

    def _start_pod(self, name, template, revision):
        pod_name = f"{name}-{revision}-{random.randrange(16**5):05x}"
        metadata = {"name": pod_name, "namespace": self.namespace, "labels": template["metadata"]["labels"]}
        self.store.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
        pod = Pod(self, name, pod_name, template, f"127.77.{os.getpid() % 250}.{next(self._addresses)}")
        pod.revision = revision
        self.pods.append(pod)

    def _tell_status(self, deployment, pods, revision, wanted):
        ready = sum(pod.is_ready for pod in pods)
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": sum(pod.revision == revision for pod in pods),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "unavailableReplicas": max(0, wanted - ready),
        }
        if deployment.get("status") != status:
            self.store.put(deployment | {"status": status}, status_only=True)

    def _ready(self, service):
        """Addresses of the pods behind a Service."""
        with self._lock:
            selector = self.store.get("Service", self.namespace, service)["spec"]["selector"]
            return [pod.address for pod in self.pods if pod.is_ready and selector.items() <= pod.labels.items()]

    def _publish_names(self):
        names = {}
        for service in self.store.list("Service", self.namespace):
            name = service["metadata"]["name"]
            if service["spec"].get("clusterIP") == "None":
                names[name] = sorted(self._ready(name))
        written = self.names_file.with_suffix(".new")
        written.write_text(json.dumps(names))
        written.replace(self.names_file)


class ServiceProxy:
    """What kube-proxy does: each connection to the Service goes to one of its pods that are ready then."""

    def __init__(self, addresses, port):
        self._addresses, self._port = addresses, port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, name="service", daemon=True).start()

    def close(self):
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            addresses = self._addresses()
            random.shuffle(addresses)
            for address in addresses:
                try:
                    target = socket.create_connection((address, self._port), timeout=2)
                except OSError:
                    continue
                target.settimeout(None)
                for pair in ((client, target), (target, client)):
                    threading.Thread(target=_forward, args=pair, daemon=True).start()
                break
            else:
                client.close()


def _forward(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def link_model(folder, models):
    """A model volume that holds a prepared model where the demo looks for it."""
    place = models / "models"
    place.mkdir(parents=True, exist_ok=True)
    target = place / "smollm2-135m-instruct"
    shutil.copytree(folder, target, dirs_exist_ok=True)
    (target / MANIFEST).write_text("{}")
    return models
