"""How weights are loaded: LoRA adapters merged as the paper has it, and what cannot be had refused with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
MODULE = "model.layers.0.self_attn.q_proj"
RANK, ALPHA = 2, 8
Load = Callable[..., Any]


@pytest.fixture(scope="module")
def load(tiny_lm: Path) -> Load:
    from transformers import AutoModelForCausalLM

    from penstock.processors.engines.process.weights import load_weights

    return lambda **options: load_weights(AutoModelForCausalLM, str(tiny_lm), options)


def adapter(folder: Path, module: str = MODULE, size: int | None = None, **config: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    down = torch.randn(RANK, size or 1, generator=generator)
    up = torch.randn(size or 1, RANK, generator=generator)
    name = f"base_model.model.{module}"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize(("rslora", "scale"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)])
def test_an_adapter_is_added_to_the_weights(load: Load, tmp_path: Path, rslora: bool, scale: float) -> None:
    from safetensors.torch import load_file

    plain = load().get_submodule(MODULE).weight
    folder = adapter(tmp_path / "a", size=plain.shape[0], use_rslora=rslora)
    merged = load(adapters=[str(folder)])
    lora = load_file(folder / "adapter_model.safetensors")
    down, up = lora[f"base_model.model.{MODULE}.lora_A.weight"], lora[f"base_model.model.{MODULE}.lora_B.weight"]
    x = torch.randn(3, plain.shape[1])
    expected = x @ plain.T + scale * (x @ down.T @ up.T)
    assert torch.allclose(merged.get_submodule(MODULE)(x), expected, atol=1e-3)
    other = MODULE.replace("q_proj", "k_proj")
    assert torch.equal(merged.get_submodule(other).weight, load().get_submodule(other).weight)


@pytest.mark.parametrize(
    ("module", "config", "reason"),
    [
        ("model.layers.99.self_attn.q_proj", {}, "is not for this model: it has no"),
        (MODULE, {}, "has another shape"),
        (MODULE, {"use_dora": True}, "use_dora True, which cannot be merged"),
        (MODULE, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (MODULE, {"peft_type": "IA3"}, "peft_type 'IA3'"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    load: Load, tmp_path: Path, module: str, config: dict[str, Any], reason: str
) -> None:
    from penstock.schemas.errors import InvalidRequest

    with pytest.raises(InvalidRequest, match=reason):
        load(adapters=[str(adapter(tmp_path / "a", module, size=5, **config))])


def test_a_folder_without_an_adapter_and_quantised_weights_are_refused(load: Load, tmp_path: Path) -> None:
    from penstock.schemas.errors import InvalidRequest

    with pytest.raises(InvalidRequest, match=r"lacks adapter_config\.json"):
        load(adapters=[str(tmp_path)])
    with pytest.raises(InvalidRequest, match="cannot be merged into quantised weights"):
        load(adapters=[str(tmp_path)], quantization="nf4")
