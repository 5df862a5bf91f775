"""A Kubernetes API server in memory: enough of it that the real kubectl applies, compares, scales, waits and deletes.

Objects are validated as a real server does with strict field validation: unknown fields are refused.
"""

from __future__ import annotations

import copy
import datetime
import json
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import jsonschema
import kubernetes_validate
import yaml

from tests.k8s.schemas import validate

VERSION = "1.37"
NAMESPACE_SECONDS = 2.0
"""From the deletion of a namespace to that of what is in it."""


class Resource:
    """A kind of object and where it is in the API."""

    def __init__(self, api_version, kind, plural=None, namespaced=True, short=()):
        self.api_version, self.kind, self.namespaced, self.short = api_version, kind, namespaced, list(short)
        self.plural = plural or (kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s")

    @property
    def root(self):
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"


RESOURCES = [
    Resource("v1", "Namespace", namespaced=False, short=["ns"]),
    Resource("v1", "ConfigMap", short=["cm"]),
    Resource("v1", "Service", short=["svc"]),
    Resource("v1", "ServiceAccount", short=["sa"]),
    Resource("v1", "Pod", short=["po"]),
    Resource("v1", "PersistentVolumeClaim", short=["pvc"]),
    Resource("apps/v1", "Deployment", short=["deploy"]),
    Resource("apps/v1", "ReplicaSet", short=["rs"]),
    Resource("batch/v1", "Job"),
    Resource("policy/v1", "PodDisruptionBudget", short=["pdb"]),
    Resource("autoscaling/v2", "HorizontalPodAutoscaler", short=["hpa"]),
    Resource("networking.k8s.io/v1", "NetworkPolicy", short=["netpol"]),
    Resource("networking.k8s.io/v1", "Ingress", plural="ingresses", short=["ing"]),
    Resource("keda.sh/v1alpha1", "ScaledObject"),
    Resource("monitoring.coreos.com/v1", "PodMonitor"),
    Resource("monitoring.coreos.com/v1", "PrometheusRule"),
]


class ApiError(Exception):
    def __init__(self, code, reason, message):
        super().__init__(message)
        self.code, self.reason = code, reason


class Store:
    """All objects, with resource versions and a condition that tells of changes."""

    def __init__(self):
        self.changed = threading.Condition()
        self.objects = {}  # (kind, namespace, name) -> object
        self.removed = []  # (resource version, object)
        self._version = 0

    def list(self, kind, namespace=None, selector=None):
        with self.changed:
            return [
                copy.deepcopy(thing)
                for (of_kind, of_namespace, _), thing in sorted(self.objects.items())
                if of_kind == kind
                and (not namespace or of_namespace == namespace)
                and (selector or {}).items() <= thing["metadata"].get("labels", {}).items()
            ]

    def get(self, kind, namespace, name):
        with self.changed:
            thing = self.objects.get((kind, namespace, name))
            if thing is None:
                raise ApiError(404, "NotFound", f'{kind.lower()} "{name}" not found')
            return copy.deepcopy(thing)

    def put(self, thing, dry_run=False, status_only=False):
        """Creates or replaces. Generation counts changes of the spec, the resource version all changes."""
        thing = copy.deepcopy(thing)
        metadata = thing["metadata"]
        key = (thing["kind"], metadata.get("namespace", ""), metadata["name"])
        with self.changed:
            old = self.objects.get(key)
            if old is not None and status_only:
                thing = {**copy.deepcopy(old), "status": thing["status"]}
                metadata = thing["metadata"]
            if old is not None and _without_versions(old) == _without_versions(thing):
                return copy.deepcopy(old)
            self._version += 1
            before = old["metadata"] if old else {}
            generation = before.get("generation", 0) + (old is None or old.get("spec") != thing.get("spec"))
            metadata.update(
                uid=before.get("uid") or str(uuid.uuid4()),
                creationTimestamp=before.get("creationTimestamp") or _now(),
                resourceVersion=str(self._version),
                generation=generation,
            )
            if not dry_run:
                self.objects[key] = thing
                self.changed.notify_all()
            return copy.deepcopy(thing)

    def delete(self, kind, namespace, name):
        thing = self.get(kind, namespace, name)
        with self.changed:
            self._version += 1
            self.removed.append((self._version, self.objects.pop((kind, namespace, name))))
            self.changed.notify_all()
        if kind == "Namespace":
            # What is in it is deleted behind the scenes.
            threading.Timer(NAMESPACE_SECONDS, self._empty, [name]).start()
        return thing

    def _empty(self, namespace):
        for kind, _, name in [key for key in self.objects if key[1] == namespace]:
            with suppress(ApiError):
                self.delete(kind, namespace, name)

    @property
    def version(self):
        return self._version


def _without_versions(thing):
    thing = copy.deepcopy(thing)
    for name in ("resourceVersion", "generation", "managedFields"):
        thing["metadata"].pop(name, None)
    return thing


def _now():
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def merge_patch(target, patch):
    """RFC 7386."""
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict):
            target[name] = merge_patch(target[name] if isinstance(target.get(name), dict) else {}, value)
        else:
            target[name] = value
    return target


MERGE_KEYS = {"containers": "name", "initContainers": "name", "env": "name", "volumes": "name",
              "volumeMounts": "mountPath", "ports": "containerPort"}  # fmt: skip


def strategic_merge(target, patch):
    """Lists of named things merge by their key, others are replaced; `$patch: delete` removes."""
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict):
            target[name] = strategic_merge(target[name] if isinstance(target.get(name), dict) else {}, value)
        elif isinstance(value, list) and name in MERGE_KEYS and isinstance(target.get(name), list):
            target[name] = _merge_lists(target[name], value, MERGE_KEYS[name])
        else:
            target[name] = value
    return target


def _merge_lists(old, patch, key):
    merged = {entry.get(key): entry for entry in old}
    for entry in patch:
        if entry.get("$patch") == "delete":
            merged.pop(entry.get(key), None)
        else:
            merged[entry.get(key)] = strategic_merge(merged.get(entry.get(key), {}), entry)
    return list(merged.values())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *arguments):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def _answer(self):
        url = urlparse(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        try:
            self._route([part for part in url.path.split("/") if part], query)
        except ApiError as error:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            self._send(status | {"reason": error.reason, "message": str(error), "code": error.code}, error.code)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815

    def _send(self, content, code=200):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self):
        length = int(self.headers.get("Content-Length") or 0)
        return yaml.safe_load(self.rfile.read(length)) if length else None

    # discovery

    def _route(self, parts, query):
        groups = sorted({r.api_version for r in RESOURCES if "/" in r.api_version})
        match parts:
            case ["version"]:
                self._send({"major": "1", "minor": VERSION.split(".")[1], "gitVersion": f"v{VERSION}.0"})
            case ["api"]:
                self._send({"kind": "APIVersions", "versions": ["v1"]})
            case ["apis"]:
                self._send({"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in groups]})
            case ["openapi", "v3"]:
                paths = {root.strip("/"): {"serverRelativeURL": f"/openapi/v3{root}"} for root in _roots()}
                self._send({"paths": paths})
            case ["openapi", "v3", *rest]:
                self._send(_openapi("/" + "/".join(rest)))
            case ["api", "v1", *rest]:
                self._objects("v1", rest, query)
            case ["apis", group, version, *rest]:
                self._objects(f"{group}/{version}", rest, query)
            case _:
                raise ApiError(404, "NotFound", "the server could not find the requested resource")

    def _objects(self, api_version, parts, query):
        of_version = [r for r in RESOURCES if r.api_version == api_version]
        if not of_version:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if not parts:
            self._send(_resource_list(api_version, of_version))
            return
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        resource = next((r for r in of_version if r.plural == parts[0]), None)
        if resource is None:
            raise ApiError(404, "NotFound", f"no such resource: {parts[0]}")
        name, subresource = (*parts[1:], None, None)[:2]
        match self.command:
            case _ if subresource == "scale":
                self._scale(namespace, name)
            case "GET" if name:
                self._send(self.store.get(resource.kind, namespace, name))
            case "GET" if query.get("watch") in ("1", "true"):
                self._watch(resource, namespace, query)
            case "GET":
                self._send(self._list(resource, namespace, query))
            case "DELETE":
                self._body()
                self._send(self.store.delete(resource.kind, namespace, name))
            case _:
                self._write(resource, namespace, name, query)

    # objects

    def _selected(self, resource, namespace, query):
        selector = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
        field = query.get("fieldSelector", "")
        found = self.store.list(resource.kind, namespace, selector)
        if field.startswith("metadata.name="):
            found = [thing for thing in found if thing["metadata"]["name"] == field.partition("=")[2]]
        return found

    def _list(self, resource, namespace, query):
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": {"resourceVersion": str(self.store.version)},
            "items": self._selected(resource, namespace, query),
        }

    def _watch(self, resource, namespace, query):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def tell(kind, thing):
            data = json.dumps({"type": kind, "object": thing}).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        seen = int(query.get("resourceVersion") or 0)
        if query.get("sendInitialEvents") == "true":
            for thing in self._selected(resource, namespace, query):
                tell("ADDED", thing)
            seen = self.store.version
            metadata = {"resourceVersion": str(seen), "annotations": {"k8s.io/initial-events-end": "true"}}
            tell("BOOKMARK", {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata})
        end = time.monotonic() + min(float(query.get("timeoutSeconds") or 30), 30)
        while time.monotonic() < end:
            with self.store.changed:
                newest = self.store.version
                news = [("MODIFIED", t) for t in self._selected(resource, namespace, query)]
                news += [
                    ("DELETED", t)
                    for version, t in self.store.removed
                    if version > seen and t["kind"] == resource.kind and t["metadata"].get("namespace", "") == namespace
                ]
                if newest == seen:
                    self.store.changed.wait(0.2)
            for kind, thing in news:
                if kind == "DELETED" or int(thing["metadata"]["resourceVersion"]) > seen:
                    tell(kind, thing)
            seen = newest
        self.wfile.write(b"0\r\n\r\n")

    def _scale(self, namespace, name):
        """A Deployment's number of replicas as an object of its own, which `kubectl scale` and autoscalers write."""
        deployment = self.store.get("Deployment", namespace, name)
        if self.command != "GET":
            deployment["spec"]["replicas"] = self._body()["spec"]["replicas"]
            deployment = self.store.put(deployment)
        scale = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": deployment["metadata"]}
        status = {"replicas": deployment.get("status", {}).get("replicas", 0)}
        self._send(scale | {"spec": {"replicas": deployment["spec"]["replicas"]}, "status": status})

    def _write(self, resource, namespace, name, query):
        body = self._body()
        old = None
        if self.command == "POST":
            name = body["metadata"]["name"]
            if (resource.kind, namespace, name) in self.store.objects:
                raise ApiError(409, "AlreadyExists", f'{resource.plural} "{name}" already exists')
        else:
            old = self.store.get(resource.kind, namespace, name)
        before = copy.deepcopy(old)
        new = self._patched(old, body)
        new |= {"apiVersion": resource.api_version, "kind": resource.kind}
        if namespace:
            new["metadata"]["namespace"] = namespace
            self.store.get("Namespace", "", namespace)
        if resource.kind == "Job" and old is not None and new["spec"]["template"] != before["spec"]["template"]:
            raise ApiError(422, "Invalid", f'Job "{name}" is invalid: spec.template: field is immutable')
        try:
            validate(_as_sent(new), VERSION)
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            raise ApiError(422, "Invalid", f"strict decoding error: {error.message}") from error
        stored = self.store.put(new, dry_run=query.get("dryRun") == "All")
        self._send(stored, 201 if old is None else 200)

    def _patched(self, old, body):
        if self.command in ("POST", "PUT"):
            return body
        match (self.headers.get("Content-Type") or "").split(";")[0]:
            case "application/strategic-merge-patch+json":
                return strategic_merge(old, body)
            case "application/merge-patch+json":
                return merge_patch(old, body)
            case other:
                raise ApiError(415, "UnsupportedMediaType", f"no patches of type {other}")


def _as_sent(thing):
    """Without what only a server writes."""
    thing = {name: value for name, value in thing.items() if name != "status"}
    own = {"uid", "creationTimestamp", "resourceVersion", "generation", "managedFields"}
    return thing | {"metadata": {name: v for name, v in thing["metadata"].items() if name not in own}}


def _roots():
    return sorted({r.root for r in RESOURCES})


def _group(api_version):
    group, version = api_version.split("/")
    versions = [{"groupVersion": api_version, "version": version}]
    return {"name": group, "versions": versions, "preferredVersion": versions[0]}


def _resource_list(api_version, resources):
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    entries = [
        {"name": r.plural, "singularName": r.kind.lower(), "namespaced": r.namespaced, "kind": r.kind, "verbs": verbs,
         "shortNames": r.short}
        for r in resources
    ]  # fmt: skip
    entries += [
        {"name": f"{r.plural}/scale", "singularName": "", "namespaced": True, "kind": "Scale", "group": "autoscaling",
         "version": "v1", "verbs": ["get", "patch", "update"]}
        for r in resources if r.kind == "Deployment"
    ]  # fmt: skip
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": entries}


def _openapi(root):
    """Says that fields are validated here, which is what kubectl looks for before it trusts the server with it."""
    paths = {}
    options = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("fieldValidation", "dryRun")]
    for resource in (r for r in RESOURCES if r.root == root):
        group, _, version = resource.api_version.rpartition("/")
        operation = {
            "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": resource.kind},
            "parameters": options,
            "responses": {"200": {"description": "OK"}},
        }
        path = root + ("/namespaces/{namespace}" if resource.namespaced else "") + f"/{resource.plural}"
        paths[path] = {"post": operation, "get": operation}
        paths[path + "/{name}"] = {"patch": operation, "get": operation, "put": operation, "delete": operation}
    return {"openapi": "3.0.0", "info": {"title": "tests", "version": VERSION}, "paths": paths, "components": {}}


@contextmanager
def api_server(folder: Path):
    """Runs a server on loopback. Gives (its store, a kubeconfig in `folder`)."""
    store = Store()
    handler = type("Handler", (_Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="api-server", daemon=True).start()
    config = folder / "kubeconfig"
    url = f"http://127.0.0.1:{server.server_address[1]}"
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "tests", "cluster": {"server": url}}],
                "users": [{"name": "tests", "user": {}}],
                "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
                "current-context": "tests",
            }
        )
    )
    try:
        yield store, config
    finally:
        server.shutdown()
        server.server_close()
