"""Where models come from and what they will take, known before loading."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.processors.core.ledger import CannotLoad
from penstock.processors.engines import loading
from penstock.processors.models import sizing
from penstock.processors.models.catalog import ModelConfig
from penstock.schemas.errors import InvalidRequest


def write_safetensors(path: Path, shapes: dict[str, tuple[str, int]]) -> None:
    """A file with a true header; the weights themselves are never read here."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, count) in shapes.items():
        size = count * sizing.DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def of(engine: str, options: dict[str, Any]) -> ModelConfig:
    return ModelConfig(id="m", source="m", engine=engine, options=options)


def test_parameters_over_all_shards(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", 1000), "b": ("F32", 24)})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": ("F16", 7)})
    assert sizing.parameters(tmp_path) == 1031


def test_need_is_weights_cache_logits_and_process(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", 1_000_000)})
    config = {"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**config, "vocab_size": 50}}))
    options = {"cache_tokens": 1000, "block_size": 32, "slots": 4, "dtype": "bfloat16"}
    assert loading.cache_tokens(options) == 992
    kv = 992 * 2 * 2 * 4 * 8 * 2
    logits = 4 * 50 * 4 * sizing.LOGITS_COPIES
    expected = 2_000_000 + kv + logits + sizing.PROCESS_BYTES
    assert sizing.text_need(tmp_path, of("text", options)) == expected
    assert sizing.weights_need(tmp_path, of("embedding", options)) == 2_000_000 + sizing.PROCESS_BYTES
    on_card = {**options, "device": "cuda"}
    assert sizing.text_need(tmp_path, of("text", on_card)) == expected + loading.CUDA_CONTEXT_BYTES


def test_pickled_weights_are_not_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidRequest, match="safetensors"):
        sizing.text_need(tmp_path, of("text", {}))


@pytest.mark.parametrize("source", ["no-such-model", "/no/such/folder", "./nothing", "a/b/c"])
def test_what_cannot_be_a_model_names_the_cure(source: str) -> None:
    with pytest.raises(InvalidRequest, match="neither a folder"):
        sizing.local_path(source)


@pytest.mark.parametrize(
    ("options", "device", "dtype"),
    [
        ({}, "cpu", "float32"),
        ({"device": "cuda"}, "cuda:0", "bfloat16"),
        ({"device": "cuda:1"}, "cuda:1", "bfloat16"),
        ({"dtype": "bfloat16"}, "cpu", "bfloat16"),
    ],
)
def test_device_and_dtype(options: dict[str, str], device: str, dtype: str) -> None:
    assert (loading.device_name(options), loading.dtype_name(options)) == (device, dtype)


def test_an_estimate_counts_bytes_and_the_answer_in_whole_blocks() -> None:
    options = {"cache_tokens": 1000, "block_size": 32, "slots": 4}
    config = ModelConfig(id="m", source="x", engine="text", options=options, defaults={"max_tokens": 100})
    found = sizing.estimate(config)
    assert (found.limits.slots, found.limits.tokens) == (4, 992)
    assert found.need_tokens(40, 10) == 32
    assert found.need_tokens(40, None) == 128
    assert found.need_tokens(1_000_000, 10) == 992
    for engine, slots in (("noop", 256), ("remote", 8), ("embedding", 256)):
        found = sizing.estimate(ModelConfig(id="m", source="x", engine=engine))
        assert (found.limits.slots, found.limits.tokens, found.need_tokens(10_000, 5)) == (slots, None, 0)


async def test_quantisation_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "find_spec", lambda name: None)
    config = ModelConfig(id="m", source="/x", engine="text", options={"quantization": "nf4"})
    with pytest.raises(CannotLoad, match="needs the package bitsandbytes"):
        await sizing.size_model(config)
