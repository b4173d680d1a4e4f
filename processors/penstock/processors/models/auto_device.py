"""Where the models run whose entries name no device: on a card that can hold them, else in main memory.

Placement then takes, of the cards, the one with the most free memory.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.models.catalog import ModelConfig, engine_identity

logger = logging.getLogger(__name__)

CARD = "cuda"


def torch_has_cuda() -> bool:
    """Whether the torch that is installed computes on cards. It is not imported: that takes seconds and much memory."""
    found = importlib.util.find_spec("torch")
    for folder in () if found is None else found.submodule_search_locations or ():
        try:
            version = (Path(folder) / "version.py").read_text()
        except OSError:
            continue
        return re.search(r"^cuda\b.*= *['\"]", version, re.MULTILINE) is not None
    return False


class AutoDevice:
    """Chooses between cards and main memory. A model that is larger than each card is remembered."""

    def __init__(self, capacities: Sequence[DeviceCapacity], *, has_cuda: bool) -> None:
        """`has_cuda`: whether engines can compute on cards."""
        cards = [one for one in capacities if one.kind == CARD]
        self._largest_bytes = max((one.limit_bytes for one in cards), default=0) if has_cuda else 0
        if cards and not has_cuda:
            logger.warning("device.auto cards=%d: torch has no CUDA here, models run in main memory", len(cards))
        self._too_large: set[str] = set()

    def place(self, config: ModelConfig) -> ModelConfig:
        """The configuration with a card where it names no device and one can hold it."""
        if config.device is not None or "device" in config.options or not config.kind.on_card:
            return config
        if not self._largest_bytes or (config.vram_bytes or 0) > self._largest_bytes:
            return config
        placed = replace(config, device=CARD, options={**config.options, "device": CARD})
        return config if engine_identity(placed) in self._too_large else placed

    def is_too_large(self, config: ModelConfig, need_bytes: int) -> bool:
        """Whether the model, which `place` gave a card, needs more than each card has; it is not given one any more."""
        placed = self.place(config)
        if placed is config or need_bytes <= self._largest_bytes:
            return False
        self._too_large.add(engine_identity(placed))
        logger.warning(
            "device.auto model=%s bytes=%d largest_card_bytes=%d: no card can hold it, it runs in main memory",
            config.id,
            need_bytes,
            self._largest_bytes,
        )
        return True
