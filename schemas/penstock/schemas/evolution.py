"""Evolution: every released version of a record and its current schema must read each other (FULL_TRANSITIVE)."""

from __future__ import annotations

import json
from typing import Any

from penstock.schemas.codec import SCHEMA_IDS, released_schema, schema_text


def check_compatibility(old: str, new: str) -> list[str]:
    """What keeps readers of one schema from reading what the other wrote; empty when they are fully compatible.

    Needs the package `avro` (extra `schemas-check`), whose checker follows Avro's own rules of schema resolution.
    """
    import avro.compatibility as compatibility
    import avro.schema

    problems: list[str] = []
    for reader, writer, direction in ((new, old, "new cannot read old"), (old, new, "old cannot read new")):
        checker: Any = compatibility.ReaderWriterCompatibilityChecker()
        result = checker.get_compatibility(avro.schema.parse(reader), avro.schema.parse(writer))
        if result.compatibility is not compatibility.SchemaCompatibilityType.compatible:
            problems += [f"{direction}: {message}" for message in sorted(result.messages)]
    return problems


def check_all() -> dict[str, list[str]]:
    """For each record what is wrong between its current schema and any released version.

    A current schema that differs from the latest release without being one is a problem too: it needs a version file.
    """
    found: dict[str, list[str]] = {}
    for name, ids in SCHEMA_IDS.items():
        current = schema_text(name)
        problems: list[str] = []
        released = [text for schema_id in ids if (entry := released_schema(schema_id)) and (text := entry[2])]
        for version, text in enumerate(released, start=1):
            problems += [f"version {version}: {problem}" for problem in check_compatibility(text, current)]
        if not released or json.loads(released[-1]) != json.loads(current):
            problems.append(f"the current schema is no release: copy it to versions/{name}/v{len(ids) + 1}.avsc")
        found[name] = problems
    return found
