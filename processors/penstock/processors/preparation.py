"""What was made of a request before its run."""

from __future__ import annotations

from typing import NamedTuple

from penstock.processors.conversations.messages import Shown
from penstock.processors.engines.base import Prepared, RunSpec


class Preparation(NamedTuple):
    """For its engine, and for its conversation: the images that its own messages show."""

    spec: RunSpec
    prepared: Prepared
    shown: Shown | None = None
