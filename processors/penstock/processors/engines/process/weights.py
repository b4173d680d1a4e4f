"""A model's weights as its entry wants them: in its type, quantised or not, with LoRA adapters merged in.

Weights and adapters are read from safetensors (or GGUF) alone: a pickle is never opened. Python code that a model's
folder brings is run only when the entry says so. Called inside an engine's process, where torch is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.processors.engines.process.loading import device_name, dtype_name
from penstock.schemas.errors import InvalidRequest

_PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
}
"""What an adapter's configuration may say of what is not merged here, so that nothing is left out unseen."""


def code_option(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` about Python code in the model's folder."""
    return {"trust_remote_code": bool(options.get("trust_remote_code", False))}


def load_weights(kind: Any, folder: str, options: Mapping[str, Any], gguf: Mapping[str, Any] | None = None) -> Any:
    """A model of one of transformers' auto classes on its device, ready to run.

    Raises InvalidRequest for what its entry asks for and cannot be had.
    """
    import torch

    source: dict[str, Any] = dict(gguf) if gguf else {"use_safetensors": True}
    source |= {"dtype": getattr(torch, dtype_name(options)), **code_option(options)}
    quantization, adapters = options.get("quantization"), [Path(one) for one in options.get("adapters", ())]
    device = device_name(options)
    if quantization is None:
        model: Any = kind.from_pretrained(folder, **source)
        for adapter in adapters:
            merge_lora(model, adapter)
        return model.to(device).eval()
    if adapters:
        raise InvalidRequest("adapters cannot be merged into quantised weights; leave out quantization or adapters")
    config = quantization_config(str(quantization), source["dtype"])
    return kind.from_pretrained(folder, **source, quantization_config=config, device_map={"": device}).eval()


def quantization_config(name: str, dtype: Any) -> Any:
    """bitsandbytes' configuration: LLM.int8() (arXiv 2208.07339), or 4 bits as QLoRA has them (arXiv 2305.14314)."""
    from transformers import BitsAndBytesConfig

    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=name, bnb_4bit_compute_dtype=dtype)


def merge_lora(model: Any, folder: Path) -> None:
    """Add a LoRA adapter (arXiv 2106.09685), as PEFT saves it, to the weights: W + alpha / r · B · A.

    Raises InvalidRequest for an adapter of another kind, or for another model.
    """
    import torch
    from safetensors.torch import load_file

    config_file, weights_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not config_file.is_file() or not weights_file.is_file():
        raise InvalidRequest(f"the adapter {folder} lacks adapter_config.json or adapter_model.safetensors")
    config: dict[str, Any] = json.loads(config_file.read_text())
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise InvalidRequest(f"the adapter {folder} has {name} {config.get(name)!r}, which cannot be merged")
    tensors: dict[str, Any] = load_file(weights_file)
    modules: dict[str, Any] = dict(model.named_modules())
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            path = name.removesuffix(".lora_A.weight")
            down, up = tensors.pop(name), tensors.pop(f"{path}.lora_B.weight", None)
            module = modules.get(path.removeprefix(_PREFIX))
            if module is None or up is None:
                raise InvalidRequest(f"the adapter {folder} is not for this model: it has no {path}")
            rank = down.shape[0]
            scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
            delta = scale * (up.float() @ down.float())
            if config.get("fan_in_fan_out"):
                delta = delta.T
            if delta.shape != module.weight.shape:
                raise InvalidRequest(f"the adapter {folder} is not for this model: {path} has another shape")
            module.weight.copy_(module.weight.float() + delta)
    if tensors:
        raise InvalidRequest(f"the adapter {folder} has {next(iter(tensors))}, which cannot be merged")
