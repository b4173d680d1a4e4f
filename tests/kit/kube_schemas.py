"""JSON schemas for kubeconform, made of Kubernetes' OpenAPI and of the definitions of custom resources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml

from kit.go_tools import go_module
from kit.helm_chart import KUBERNETES
from penstock.cli.paths import cache_dir, exclusive

OPERATOR = "example/prometheus-operator-crd/monitoring.coreos.com_{}.yaml"
MODULES = {
    f"k8s.io/kubernetes@v{KUBERNETES}": ["api/openapi-spec/swagger.json"],
    "github.com/kedacore/keda/v2@v2.21.0": ["config/crd/bases/keda.sh_scaledobjects.yaml"],
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": [
        OPERATOR.format(kind) for kind in ("podmonitors", "servicemonitors", "prometheusrules")
    ],
}
Schema = dict[str, Any]
INT_OR_STRING = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
QUANTITY = {"oneOf": [{"type": "string"}, {"type": "number"}]}
OWN_FORMS = {
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": INT_OR_STRING,
    "io.k8s.apimachinery.pkg.api.resource.Quantity": QUANTITY,
}


def kube_schemas() -> str:
    """Where kubeconform finds the schemas, as its option takes it."""
    digest = f"{crc32(repr(MODULES).encode()):08x}"
    folder = cache_dir() / "kube-schemas" / digest
    with exclusive(folder.with_suffix(".lock")):
        if not folder.exists():
            staging = folder.with_suffix(".tmp")
            staging.mkdir(parents=True, exist_ok=True)
            for path in (go_module(module) / path for module, paths in MODULES.items() for path in paths):
                for name, schema in _of_file(path):
                    (staging / name).write_text(json.dumps(schema))
            staging.rename(folder)
    return f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"


def _of_file(path: Path) -> Iterator[tuple[str, Schema]]:
    if path.suffix == ".json":
        yield from _of_openapi(json.loads(path.read_text()))
        return
    for resource in yaml.safe_load_all(path.read_text()):
        spec = resource["spec"]
        for version in spec["versions"]:
            group = spec["group"].partition(".")[0]
            name = f"{spec['names']['kind']}-{group}-{version['name']}.json".lower()
            yield name, _strict(version["schema"]["openAPIV3Schema"])


def _of_openapi(document: Schema) -> Iterator[tuple[str, Schema]]:
    definitions = {name: OWN_FORMS.get(name) or _strict(one) for name, one in document["definitions"].items()}
    for name, one in document["definitions"].items():
        for kind in one.get("x-kubernetes-group-version-kind", []):
            group = kind["group"].partition(".")[0]
            file = "-".join(filter(None, (kind["kind"], group, kind["version"]))).lower()
            yield f"{file}.json", {"$ref": f"#/definitions/{name}", "definitions": _reached(name, definitions)}


def _reached(name: str, definitions: dict[str, Schema]) -> dict[str, Schema]:
    """The definitions that one refers to, itself among them."""
    found: dict[str, Schema] = {}
    names = [name]
    while names:
        name = names.pop()
        if name not in found:
            found[name] = definitions[name]
            names += [one.rpartition("/")[2] for one in _references(found[name])]
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from _references(one)
    elif isinstance(value, list):
        for one in value:
            yield from _references(one)


def _strict(schema: Any) -> Any:
    """The same without fields that it does not name."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return INT_OR_STRING
    strict = {name: _strict(one) for name, one in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and "$ref" not in schema["properties"] and not is_open:
        strict["additionalProperties"] = False
    return strict
