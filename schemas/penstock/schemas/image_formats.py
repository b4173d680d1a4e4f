"""Which image format some bytes are in, by how they begin. What a file's name or sender calls it is not looked at."""

from __future__ import annotations

MEDIA_TYPES: dict[str, str] = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "TIFF": "image/tiff",
}
"""By format, as Pillow names it. Whether a format is accepted is a setting of the worker."""

SNIFFED_BYTES = 12
"""How many bytes tell the format."""


def sniff(data: bytes) -> str | None:
    """One of MEDIA_TYPES; None for bytes that begin like none of them."""
    head = data[:SNIFFED_BYTES]
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:2] == b"BM":
        return "BMP"
    if head[:4] in (b"II*\x00", b"MM\x00*"):
        return "TIFF"
    return None
