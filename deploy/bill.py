"""The software bill of materials of an image: its Python and Debian packages with their licences, as CycloneDX 1.6.

With `--python` the Python packages alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from urllib.parse import quote

LIST_DEBIAN = ["dpkg-query", "--show", "--showformat=${Package} ${Version}\n"]


def licence(package: Distribution) -> str:
    """As its author wrote it, by the newest of the three fields that packages have for it."""
    about = package.metadata
    classified = [
        field.rpartition(" :: ")[2] for field in about.get_all("Classifier") or () if field.startswith("License ::")
    ]
    written = about.get("License-Expression") or ", ".join(classified) or about.get("License") or "not stated"
    return written.strip().partition("\n")[0]


def component(kind: str, name: str, version: str, licence: str) -> dict[str, object]:
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:{kind}/{name.lower().replace('_', '-')}@{quote(version)}",
        "licenses": [{"license": {"name": licence}}],
    }


def python_packages() -> list[dict[str, object]]:
    found = [component("pypi", one.name, one.version, licence(one)) for one in distributions()]
    return sorted(found, key=lambda one: str(one["purl"]))


def debian_packages() -> list[dict[str, object]]:
    listed = subprocess.run(LIST_DEBIAN, check=True, capture_output=True, text=True).stdout.split()
    return [
        component("deb/debian", name, version, f"/usr/share/doc/{name}/copyright")
        for name, version in zip(listed[::2], listed[1::2], strict=True)
    ]


components = [*python_packages(), *([] if "--python" in sys.argv else debian_packages())]
bill = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}
json.dump(bill, sys.stdout, indent=1)
