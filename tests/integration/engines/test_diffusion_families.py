"""Families of diffusion models, tiny ones of the same parts: SDXL, Stable Diffusion 3, Flux; adapters and tiles."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from PIL import ImageChops

from penstock.cli.makers import tiny_diffusion
from penstock.schemas.errors import UnsupportedParameter
from tiny_pipelines import SIDE, make_family

from .conftest import StartEngine
from .test_diffusion_engine import LOADED_S, Watched, begin, image_of


def differ_by(first: Any, second: Any) -> int:
    """The most grey levels that any place differs by."""
    bands: Any = ImageChops.difference(first, second).getextrema()
    return max(high for _, high in bands)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
async def test_a_family_draws_edits_and_gives_up(family: str, start_engine: StartEngine, tmp_path: Path) -> None:
    make_family(family, tmp_path)
    runner = await start_engine("diffusers", tmp_path, threads=2, host={"_load_timeout_s": LOADED_S})
    size: dict[str, Any] = {"width": SIDE, "height": SIDE}

    async def image(run: Watched) -> Any:
        return image_of(await run.finished(LOADED_S))

    alone = await image(await begin(runner, seed=3, **size))
    assert alone.size == (SIDE, SIDE)
    runs = [await begin(runner, prompt=f"dam {seed}", seed=seed, **size) for seed in (1, 2)]
    runs.append(await begin(runner, seed=3, **size))
    images = await asyncio.gather(*map(image, runs))
    assert differ_by(images[2], alone) <= 1, "the same seed, alone or beside others"
    assert differ_by(images[0], images[1]) > 8
    for run in runs:
        assert [(one.step, one.steps) for one in run.steps] == [(step, 4) for step in range(1, 5)]

    for more in ({}, {"mask": True}):
        edited = await begin(runner, task="image_editing", image=True, strength=0.5, seed=5, **more, **size)
        assert (await image(edited)).size == (SIDE, SIDE)

    # One of a batch is given up between steps: the other goes on, and the place is free again.
    long = [await begin(runner, seed=seed, inference_steps=60, **size) for seed in (1, 2)]
    await asyncio.wait_for(long[0].first.wait(), LOADED_S)
    runner.engine.cancel(long[0].spec.run_id)
    await image(long[1])
    assert not long[0].done.done()
    await image(await begin(runner, seed=3, **size))

    if family == "flux":  # its latents are packed: nothing on the way is an image
        with pytest.raises(UnsupportedParameter) as caught:
            await begin(runner, previews=2, **size)
        assert caught.value.param == "payload.previews"
    else:
        shown = await begin(runner, previews=2, seed=1, **size)
        await image(shown)
        assert [one.step for one in shown.previews] == [2]


def adapter(folder: Path) -> Path:
    """A LoRA of rank 2 for one matrix, as training scripts of diffusers save it."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    name = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    down, up = (torch.randn(shape, generator=generator) for shape in ((2, 32), (32, 2)))
    folder.mkdir()
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, folder / "pytorch_lora_weights.safetensors")
    return folder


@pytest.mark.timeout(600)
async def test_an_adapter_is_merged_and_large_images_are_decoded_in_tiles(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    tiny_diffusion.make("generation", tmp_path / "model")
    images: list[Any] = []
    kinds: list[dict[str, Any]] = [{}, {"adapters": [str(adapter(tmp_path / "lora"))]}, {"vae_tiling": True}]
    for options in kinds:
        runner = await start_engine("diffusers", tmp_path / "model", threads=2, **options)
        run = await begin(runner, seed=3, width=128, height=64)
        images.append(image_of(await run.finished(LOADED_S)))
        await runner.engine.stop()
    plain, adapted, tiled = images
    assert differ_by(plain, adapted) > 1
    assert tiled.size == plain.size == (128, 64)
    assert differ_by(plain, tiled) > 0, "tiles have been made"
