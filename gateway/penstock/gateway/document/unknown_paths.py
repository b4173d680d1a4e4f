"""What a path that no route has is answered: the error shape of all others, with the routes that are near it."""

from __future__ import annotations

import re
from difflib import get_close_matches

from penstock.gateway.document.described_routes import ROUTES
from penstock.gateway.edge.rules import shown_path
from penstock.schemas.errors import NotFound

NEAR = 0.75
SHOWN_CHARS = 200


PATHS = sorted({shown_path(path) for _, path in ROUTES} - {"/"})


def not_found(path: str) -> NotFound:
    """The error for an unknown path; it names up to three that are near."""
    near = near_paths(path, PATHS)
    shown = path[:SHOWN_CHARS].encode(errors="backslashreplace").decode()
    hint = f"; near it: {', '.join(near)}" if near else "; GET /docs lists the routes"
    return NotFound(f"there is no route {shown}{hint}", details={"near": near})


def near_paths(path: str, paths: list[str]) -> list[str]:
    """Paths that may have been meant, the likeliest first: /v1 left out, a slip of the pen, a word that is missing."""
    asked = path.rstrip("/")[:SHOWN_CHARS]
    if f"/v1{asked}" in paths:
        return [f"/v1{asked}"]
    likely = get_close_matches(_general(asked), [_general(one) for one in paths], n=3, cutoff=NEAR)
    found = [one for general in likely for one in paths if _general(one) == general]
    below = [one for one in paths if asked.count("/") > 1 and one.startswith(f"{asked}/")]
    return list(dict.fromkeys([*found, *below]))[:3]


def _general(path: str) -> str:
    """A path with its parameters as one short word, and ids that look like such too."""
    return re.sub(r"\{[^}]+\}|[0-9a-f-]{32,36}", "ID", path)
