"""A request for images as the diffusion engine takes it: checked against what its model can do, with all defaults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.images.diffusion_pipelines import INPAINT, INSTRUCT, TEXT, Pipelines
from penstock.processors.images.pictures import in_colours, mask_in_grey, opened
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.records import OutputSpec

STEPS = 30
GUIDANCE = 7.5
STRENGTH = 0.8
MAX_PIXELS = 2048 * 2048

BatchKey = tuple[Any, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class DiffusionJob:
    """One run. `key`: what is equal for all runs of a batch."""

    run_id: str
    key: BatchKey
    kind: str
    prompt: str
    negative_prompt: str
    width: int
    height: int
    steps: int
    guidance: float
    sampler: str | None
    strength: float | None
    seeds: list[int]
    image: Any = None
    mask: Any = None
    previews: int | None = None
    output: OutputSpec | None = None
    cancelled: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    made: dict[int, Any] = field(default_factory=dict[int, Any])
    """Its images by number, as far as they are there."""


@dataclass(slots=True, eq=False)
class JobPart:
    """Images of one run that are made together: all of them, or as many as memory is enough for."""

    job: DiffusionJob
    numbers: Sequence[int]


def make_job(spec: RunSpec, pipelines: Pipelines, model: str, max_pixels: int) -> DiffusionJob:
    """Raises UnsupportedParameter, InvalidRequest for what this model cannot do."""
    payload = spec.payload
    kind = pipelines.kind_for(spec.task, payload)
    sampler = pipelines.samplers.named(payload.get("sampler"))
    _only_what_it_takes(payload, kind, pipelines)
    image, mask = (opened(spec.images[name]) if name in spec.images else None for name in ("image", "mask"))
    width, height = _size(payload, image, pipelines, max_pixels)
    if mask is not None:
        mask = mask_in_grey(mask, image).resize((width, height))
    if image is not None:
        image = in_colours(image).resize((width, height))
    steps = int(payload.get("inference_steps", STEPS))
    strength = float(payload.get("strength", STRENGTH)) if "strength" in pipelines.parameters(kind) else None
    if strength is not None and kind != TEXT and int(steps * strength) < 1:
        raise InvalidRequest(
            f"payload.strength: {steps} steps at {strength:g} are none; more of either", param="payload.strength"
        )
    guidance = float(payload.get("guidance_scale", GUIDANCE))
    seeds = _seeds(payload)
    facts = {
        "model": model,
        "prompt": payload["prompt"],
        "negative_prompt": payload.get("negative_prompt"),
        "steps": steps,
        "guidance_scale": guidance,
        "sampler": sampler,
        "strength": strength if kind != TEXT else None,
    }
    return DiffusionJob(
        run_id=spec.run_id,
        key=(kind, width, height, steps, guidance, sampler, strength),
        kind=kind,
        prompt=payload["prompt"],
        negative_prompt=payload.get("negative_prompt") or "",
        width=width,
        height=height,
        steps=steps,
        guidance=guidance,
        sampler=sampler,
        strength=strength if kind != TEXT else None,
        seeds=seeds,
        image=image,
        mask=mask if kind == INPAINT else None,
        previews=payload.get("previews"),
        output=spec.output,
        facts=facts,
    )


def _only_what_it_takes(payload: Mapping[str, Any], kind: str, pipelines: Pipelines) -> None:
    """Raises UnsupportedParameter for what would be passed over."""
    taken = pipelines.parameters(kind)
    wanted = {"negative_prompt": "negative_prompt", "guidance_scale": "guidance_scale", "strength": "strength"}
    for name, parameter in wanted.items():
        # Models with guidance built in, as Flux, take a negative prompt only with a second pass that is off.
        lacks = parameter not in taken or (name == "negative_prompt" and "true_cfg_scale" in taken)
        if payload.get(name) is not None and (lacks or (name == "strength" and kind in (TEXT, INSTRUCT))):
            instructed = " (it edits by instructions: the prompt says how far to go)" if kind == INSTRUCT else ""
            raise UnsupportedParameter(
                f"payload.{name}: this model has none for such a request{instructed}; leave it out",
                param=f"payload.{name}",
            )
    if payload.get("previews") is not None and not pipelines.shows_previews:
        raise UnsupportedParameter("payload.previews: this model can show none", param="payload.previews")


def _size(payload: Mapping[str, Any], image: Any, pipelines: Pipelines, max_pixels: int) -> tuple[int, int]:
    """(width, height): as asked for, else the image's rounded down, else the model's own."""
    multiple = pipelines.multiple
    own = (
        (pipelines.side, pipelines.side)
        if image is None
        else tuple(max(1, n // multiple) * multiple for n in image.size)
    )
    sides: list[int] = []
    for name, default in zip(("width", "height"), own, strict=True):
        side = int(payload.get(name) or default)
        if side % multiple:
            nearest = max(1, round(side / multiple)) * multiple
            raise InvalidRequest(
                f"payload.{name} is {side}; this model makes multiples of {multiple}: the nearest is {nearest}",
                param=f"payload.{name}",
                details={"multiple": multiple, "nearest": nearest},
            )
        sides.append(side)
    if sides[0] * sides[1] > max_pixels:
        raise InvalidRequest(
            f"{sides[0]} × {sides[1]} is more than the {max_pixels} pixels that this model makes", param="payload.width"
        )
    return sides[0], sides[1]


def _seeds(payload: Mapping[str, Any]) -> list[int]:
    """One for each image: the given one and those after it; without one it is drawn."""
    seed = payload.get("seed")
    first = random.SystemRandom().randrange(2**32) if seed is None else int(seed)
    return [(first + number + 2**63) % 2**64 - 2**63 for number in range(int(payload.get("n") or 1))]
