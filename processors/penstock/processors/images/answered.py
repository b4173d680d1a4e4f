"""The images that a server answers with: base64 or URLs, fetched and decoded as those of callers are."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.decoders import decoders_of
from penstock.processors.images.fetching import fetcher_of
from penstock.processors.settings import ImagesSection
from penstock.schemas.errors import InvalidRequest, TooLarge

_BESIDE_IMAGES = 1 << 20
"""Bytes that an answer may have beside its images."""


class AnsweredImages:
    """Images of one server, whose URLs may name its own host beside those of `[images]`. Used on one event loop."""

    def __init__(self, settings: ImagesSection, server_url: str) -> None:
        self._max_bytes = settings.max_bytes
        self._decoders = decoders_of(settings)
        self._fetcher = fetcher_of(settings, also=[urlsplit(server_url).netloc.rpartition("@")[2]])

    def most_bytes(self, count: int) -> int:
        """The longest answer with so many images in base64."""
        return count * (self._max_bytes * 4 // 3 + 4) + _BESIDE_IMAGES

    async def decoded(self, item: Mapping[str, Any], *, place: str) -> DecodedImage:
        """The image of an entry {b64_json} or {url}.

        Raises as `ImageFetcher` and `Decoders`, naming `place`; InvalidRequest for an entry that has neither.
        """
        text, url = item.get("b64_json"), item.get("url")
        if isinstance(text, str) and text:
            data = await asyncio.to_thread(_from_base64, text, place)
        elif isinstance(url, str) and url:
            data = await self._fetcher.fetch(url, param=f"{place}.url")
        else:
            raise InvalidRequest(f"{place} has neither b64_json nor url", param=place)
        if len(data) > self._max_bytes:
            raise TooLarge(f"{place} has {len(data)} bytes; an image may have {self._max_bytes}", param=place)
        return await self._decoders.decode(data, param=place)

    def close(self) -> None:
        """End the processes that decode."""
        self._decoders.close()


def _from_base64(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{place}.b64_json is not base64", param=place) from None
