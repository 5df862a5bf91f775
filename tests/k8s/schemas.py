"""What objects of a kind may look like: built-in kinds by Kubernetes' own schemas, others by copies in `crds/`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate

CRDS = {
    ("cert-manager.io/v1", "Certificate"): "certificate_v1.json",
    ("cert-manager.io/v1", "Issuer"): "issuer_v1.json",
    ("keda.sh/v1alpha1", "ScaledObject"): "scaledobject_v1alpha1.json",
    ("monitoring.coreos.com/v1", "PodMonitor"): "podmonitor_v1.json",
    ("monitoring.coreos.com/v1", "PrometheusRule"): "prometheusrule_v1.json",
}


@cache
def crd_schema(name):
    text = (Path(__file__).parent / "crds" / name).read_text()
    # Python wants flags of a pattern in front.
    return json.loads(text.replace("^(?i)", "(?i)^"))


def validate(thing, version):
    """Raises jsonschema.ValidationError, or kubernetes_validate.SchemaNotFoundError for a kind that nobody knows."""
    schema = CRDS.get((thing.get("apiVersion"), thing.get("kind")))
    if schema is not None:
        jsonschema.validate(thing, crd_schema(schema))
    else:
        kubernetes_validate.validate(thing, version, strict=True)
