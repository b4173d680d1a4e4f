"""Names of samplers in the spellings of other tools."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.processors.engines.images.diffusion_pipelines import SAMPLERS, Samplers
from penstock.schemas.errors import UnsupportedParameter

KNOWN = Samplers(SimpleNamespace(compatibles=[type(kind, (), {}) for kind, _ in SAMPLERS.values()]))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("DDIM", "ddim"), ("Euler a", "euler_a"), ("euler_ancestral", "euler_a"), ("dpm++ 2m", "dpm++_2m"),
        ("DPM++ 2M Karras", "dpm++_2m_karras"), ("dpmpp_2m", "dpm++_2m"), ("uni_pc", "unipc"),
        ("DDIMScheduler", "ddim"), ("LMS", "lms"), (None, None), *((name, name) for name in SAMPLERS),
    ],
)  # fmt: skip
def test_a_sampler_in_any_spelling(given: str | None, name: str | None) -> None:
    assert KNOWN.named(given) == name


@pytest.mark.parametrize("given", ["", "dream", "euler b"])
def test_an_unknown_sampler_is_refused_with_those_that_there_are(given: str) -> None:
    with pytest.raises(UnsupportedParameter, match=r"payload\.sampler: this model knows ddim"):
        KNOWN.named(given)
