"""Samplers by their usual names, as diffusers' schedulers. Imported in an engine's process only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.schemas.errors import UnsupportedParameter

_KARRAS = {"use_karras_sigmas": True}
SAMPLERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "euler_karras": ("EulerDiscreteScheduler", _KARRAS),
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "dpm++_2m": ("DPMSolverMultistepScheduler", {}),
    "dpm++_2m_karras": ("DPMSolverMultistepScheduler", _KARRAS),
    "dpm2": ("KDPM2DiscreteScheduler", {}),
    "dpm2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
FLOW_SAMPLERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
}
"""Of models that were trained by flow matching, as SD3 and Flux."""


def _squeezed(name: str) -> str:
    plain = re.sub(r"[\s_-]+", "", name.lower()).removesuffix("scheduler")
    return plain.replace("pp", "++").replace("ancestral", "a")


class Samplers:
    """The samplers of one model. Each batch gets a scheduler of its own: they have a state."""

    def __init__(self, scheduler: Any) -> None:
        self._own = scheduler
        flow = type(scheduler).__name__.startswith("FlowMatch")
        compatible = {kind.__name__ for kind in getattr(scheduler, "compatibles", ())} | {type(scheduler).__name__}
        known = FLOW_SAMPLERS if flow else SAMPLERS
        self._known = {name: made for name, made in known.items() if flow or made[0] in compatible}

    def named(self, name: str | None) -> str | None:
        """The sampler of this name, in any spelling: `Euler a`, `DPMPP-2M`. Raises UnsupportedParameter."""
        if name is None:
            return None
        squeezed = _squeezed(name)
        # The name of a scheduler's class is that of its first sampler.
        names = ((known, made[0]) for known, made in self._known.items())
        found = next((known for known, kind in names if squeezed in (_squeezed(known), _squeezed(kind))), None)
        if found is None:
            raise UnsupportedParameter(
                f"payload.sampler: this model knows {', '.join(sorted(self._known))}", param="payload.sampler"
            )
        return found

    def make(self, name: str | None) -> Any:
        """A new scheduler; None: the model's own."""
        import diffusers

        if name is None:
            return type(self._own).from_config(self._own.config)
        kind, changes = self._known[name]
        return getattr(diffusers, kind).from_config(self._own.config, **changes)
