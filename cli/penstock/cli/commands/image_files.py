"""Files and images of the command line: a file becomes an artifact, and what was made becomes files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from penstock.cli.commands.api_paths import ApiPath
from penstock.cli.commands.common import Gateway
from penstock.cli.failures import CliFailure, ExitCode
from penstock.schemas.image_formats import MEDIA_TYPES, sniff

SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp", "image/gif": ".gif"}
UPLOAD_S = 300.0


def image_input(gateway: Gateway, source: str) -> dict[str, str]:
    """A reference to an image: a URL as it is, a file as the artifact that it becomes. Raises CliFailure."""
    if source.startswith(("http://", "https://")):
        return {"url": source}
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise CliFailure(f"{source} cannot be read: {error.strerror}", exit_code=ExitCode.USAGE) from error
    found = sniff(data)
    if found is None:
        known = ", ".join(MEDIA_TYPES)
        raise CliFailure(f"{source} is not an image of a known format ({known})", exit_code=ExitCode.USAGE)
    made = gateway.upload(data, {"content-type": MEDIA_TYPES[found]}, httpx.Timeout(UPLOAD_S))
    return {"artifact_id": made["id"]}


def save_images(gateway: Gateway, request_id: str, images: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """Fetch the images into a folder, or a single one into the file that `out` names. Raises CliFailure."""
    one_file = len(images) == 1 and out.suffix != "" and not out.is_dir()
    saved: list[Path] = []
    for number, image in enumerate(images):
        suffix = SUFFIXES.get(image.get("media_type") or "", ".bin")
        path = out if one_file else out / f"{request_id[:8]}-{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gateway.stream("GET", ApiPath(image["url"]), timeout=httpx.Timeout(UPLOAD_S)) as answer:
            part = path.with_name(f".{path.name}.part")
            with part.open("wb") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)
            part.replace(path)
        saved.append(path)
    return saved
