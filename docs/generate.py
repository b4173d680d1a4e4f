"""Write the pages of docs that are made from the code, or check that they are up to date.

.venv/bin/python docs/generate.py           writes them
.venv/bin/python docs/generate.py --check   exits 1 and names the pages that are stale

Neither passes over a change of reference/asyncapi.json that breaks clients: raise the first number of `VERSION` in
gateway/penstock/gateway/document/asyncapi.py if that is intended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from generator import commands, errors, messages, proofs, records, settings

FOLDER = Path(__file__).parent
COMMAND = ".venv/bin/python docs/generate.py"
PAGES: dict[str, Callable[[], str]] = {
    "reference/records.md": records.page,
    "reference/settings.md": settings.page,
    "reference/errors.md": errors.page,
    "reference/cli.md": commands.page,
    "reference/asyncapi.json": messages.page,
    "what-is-proven.md": proofs.page,
}


def stale() -> list[str]:
    """The names of the pages that are not what the code says now."""
    return [name for name, page in PAGES.items() if not is_file_with(FOLDER / name, page())]


def is_file_with(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def write() -> list[str]:
    """Write what is stale; the names."""
    changed = stale()
    for name in changed:
        (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
    return changed


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    broken = messages.unannounced(FOLDER / "reference/asyncapi.json")
    if broken:
        print("docs/reference/asyncapi.json: clients break", *broken, __doc__, sep="\n", file=sys.stderr)
        return 1
    if arguments:
        names = stale()
        for name in names:
            print(f"docs/{name} is stale: run `{COMMAND}`", file=sys.stderr)
        return 1 if names else 0
    for name in write():
        print(f"docs/{name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
