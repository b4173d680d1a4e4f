"""What one request may hold, and how much of a conversation its prompt holds in any case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bytes are of UTF-8. What no setting changes stands with its field in `penstock.schemas.bodies`."""

    max_text_bytes: int = 4_000_000
    max_messages: int = 2_000
    max_tokens: int = 1_000_000
    max_inputs: int = 2_048
    max_stops: int = 16
    max_ttl_ms: int = 86_400_000
    default_ttl_ms: int = 3_600_000
    max_attempts: int = 10
    max_map_entries: int = 64
    max_map_bytes: int = 16_384
    max_record_bytes: int = 1_000_000
    max_tools: int = 128
    max_images: int = 16
    max_image_pixels: int = 64 * 2**20


LIMITS = Limits()
MAX_ID_CHARS = 200
MAX_URL_CHARS = 4_096
MAX_STOP_CHARS = 200

RECENT_TURNS = 4
"""How many of a conversation's newest turns are in the prompt if they fit, also where a summary covers them: what is
asked now is about what was said last."""
