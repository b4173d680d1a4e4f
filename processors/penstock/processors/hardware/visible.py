"""What CUDA_VISIBLE_DEVICES leaves of the cards and MIG slices of a machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_INDEX = re.compile(r"\s*\+?(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A MIG slice. `names`: its UUID, and its older name MIG-<card>/<gpu instance>/<compute instance>."""

    number: int
    names: tuple[str, ...]
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A card as NVML lists it. `slices` None: MIG is off."""

    uuid: str
    total_bytes: int
    title: str = ""
    slices: tuple[Slice, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A card, or one slice of it, under the name that Penstock gives it."""

    device: str
    address: str
    total_bytes: int
    title: str = ""


def visible(shown: str | None, cards: Sequence[Card]) -> list[Shown]:
    """What a CUDA_VISIBLE_DEVICES of `shown` leaves, in its order; None: everything.

    An entry is an index, or the beginning of a card's or a slice's UUID that only one has. As CUDA does, the list ends
    at the first entry that names nothing, and shows nothing when it names something twice. A card that is cut into
    slices stands for all of them: each is a device of its own.

    The Nth card is `cuda:N`; slice M of it `cuda:N/mig:M`, with NVML's number M.
    """
    chosen: list[tuple[int, frozenset[int] | None]] = []
    """Indexes of cards, and the numbers of their slices that are shown (None: all that it has)."""
    if shown is None:
        chosen = [(index, None) for index in range(len(cards))]
    else:
        for entry in shown.split(","):
            found = _find(entry.strip(), cards)
            if found is None:
                break
            if found in chosen:
                return []
            chosen.append(found)
    return _named(chosen, cards)


def _find(entry: str, cards: Sequence[Card]) -> tuple[int, frozenset[int] | None] | None:
    if (index := _INDEX.match(entry)) is not None:
        number = int(index[1])
        return (number, None) if number < len(cards) else None
    slices = [
        (index, frozenset([one.number]))
        for index, card in enumerate(cards)
        for one in card.slices or ()
        if entry.startswith("MIG-") and any(name.startswith(entry) for name in one.names)
    ]
    whole = [
        (index, None) for index, card in enumerate(cards) if entry.startswith("GPU-") and card.uuid.startswith(entry)
    ]
    found = [*slices, *whole]
    return found[0] if len(found) == 1 else None


def _named(chosen: Sequence[tuple[int, frozenset[int] | None]], cards: Sequence[Card]) -> list[Shown]:
    numbers = {index: number for number, index in enumerate(dict.fromkeys(index for index, _ in chosen))}
    found: list[Shown] = []
    for index, wanted in chosen:
        card, name = cards[index], f"cuda:{numbers[index]}"
        if card.slices is None:
            found.append(Shown(device=name, address=card.uuid, total_bytes=card.total_bytes, title=card.title))
            continue
        found += [
            Shown(
                device=f"{name}/mig:{one.number}",
                address=one.names[0],
                total_bytes=one.total_bytes,
                title=f"{card.title}, slice {one.number}".lstrip(", "),
            )
            for one in card.slices
            if wanted is None or one.number in wanted
        ]
    return found
