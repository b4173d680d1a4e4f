"""Where models come from and what they will take, known before loading."""

import json
import struct
from pathlib import Path

import pytest

from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.engines.base import Limits
from penstock.processors.engines.process import loading
from penstock.processors.engines.process.host import ChildEngine
from penstock.processors.models import calibration, parts, sizing
from penstock.processors.models.catalog import ModelConfig
from penstock.schemas.errors import EngineFailed, InvalidRequest


def write_safetensors(path: Path, shapes: dict[str, tuple[str, int]], flat: tuple[str, ...] = ()) -> None:
    """A file with a true header; the weights themselves are never read here."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, count) in shapes.items():
        size = count * parts.DTYPE_BYTES.get(dtype, 1)
        header[name] = {
            "dtype": dtype,
            "shape": [count] if name in flat else [1, count],
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def by_name(folder: Path, kind: str, options: dict[str, object], process_bytes: int = 1) -> dict[str, int]:
    return {part.name: part.bytes for part in parts.memory_parts(folder, kind, options, process_bytes)}


def test_weights_of_all_shards_in_the_dtype_they_are_loaded_in(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", 1000), "b": ("F32", 24)})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": ("F16", 7)})
    files = parts.read_files(tmp_path)
    assert parts.weights_bytes(files, {}) == 1031 * 4
    assert parts.weights_bytes(files, {"dtype": "bfloat16"}) == 1031 * 2


def test_quantised_weights_count_as_they_lie_in_memory(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens": ("BF16", 100), "layer.weight": ("BF16", 6400), "packed": ("U8", 500)}
    write_safetensors(tmp_path / "model.safetensors", {**tensors, "norm": ("BF16", 10)}, flat=("norm",))
    files = parts.read_files(tmp_path)
    plain = 110 * 2 + 500
    assert parts.weights_bytes(files, {"dtype": "bfloat16"}) == plain + 6400 * 2
    assert parts.weights_bytes(files, {"dtype": "bfloat16", "quantization": "nf4"}) == plain + 3600
    assert parts.weights_bytes(files, {"dtype": "bfloat16", "quantization": "int8"}) == plain + 6528


def test_an_engine_is_weights_cache_batch_tokenizer_and_process(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", 1_000_000)})
    config = {"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**config, "vocab_size": 50}}))
    (tmp_path / "tokenizer.json").write_text("x" * 10)
    options = {"cache_tokens": 1000, "block_size": 32, "slots": 4, "dtype": "bfloat16", "max_batch_tokens": 16}
    assert loading.cache_tokens(options) == 992
    found = by_name(tmp_path, "text", options, 77)
    assert found["weights"] == 2_000_000
    assert found["token cache"] == 992 * 2 * 2 * 4 * 8 * 2
    assert found["batch"] == 4 * 50 * 4 * parts.LOGITS_COPIES + 16 * (992 + 16) * 2 + 16 * (6 * 64 + 3 * 256) * 2
    assert (found["tokenizer"], found["process"]) == (10 * parts.TOKENIZER_TIMES, 77)
    assert found["loading"] == 2_000_000 - found["token cache"] - found["batch"], (
        "the file's pages, while they are read"
    )
    on_card = by_name(tmp_path, "text", {**options, "device": "cuda"})
    assert on_card["token cache"] == found["token cache"]
    assert on_card["CUDA context"] == loading.CUDA_CONTEXT_BYTES
    assert "process" not in on_card
    assert "loading" not in on_card
    small = by_name(tmp_path, "embedding", {"max_batch_tokens": 1})
    assert by_name(tmp_path, "embedding", {})["batch"] > small["batch"]


def test_other_options_are_another_shape() -> None:
    assert parts.shape_of("text", {"slots": 4}) != parts.shape_of("text", {"slots": 8})
    assert parts.shape_of("embedding", {"max_batch_tokens": 4}) == (4.0,)
    assert parts.shape_of("unknown", {}) == ()


def test_pickled_weights_are_not_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidRequest, match="safetensors"):
        parts.memory_parts(tmp_path, "text", {})


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


def test_tokens_in_whole_blocks_limit_engines_with_a_cache_of_them() -> None:
    options = {"cache_tokens": 1000, "block_size": 32, "slots": 4}
    assert sizing.limits_of(ModelConfig(id="m", source="x", engine="text", options=options)) == Limits(
        slots=4, tokens=992
    )
    for engine, slots in (("noop", 256), ("remote", 8), ("embedding", 256)):
        assert sizing.limits_of(ModelConfig(id="m", source="x", engine=engine)) == Limits(slots=slots)


async def test_quantisation_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "find_spec", lambda name: None)
    config = ModelConfig(id="m", source="/x", engine="text", options={"quantization": "nf4"})
    with pytest.raises(CannotLoad, match="needs the package bitsandbytes"):
        await sizing.size_model(config)


async def test_the_process_that_is_measured_is_given_up_as_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    class Hangs(ChildEngine):
        async def start(self) -> None:
            asked.append(self._silent_s)
            raise EngineFailed("gave no sign of life")

    monkeypatch.setattr(calibration, "ChildEngine", Hangs)
    write_safetensors(tmp_path / "model.safetensors", {"a": ("F32", 1)})
    (tmp_path / "config.json").write_text("{}")
    config = ModelConfig(id="m", source=str(tmp_path), engine="embedding", options={"silent_s": 5})
    size = await sizing.size_model(config, process_bytes=calibration.Calibration().process_bytes)
    assert asked == [5]
    assert {part.name: part.bytes for part in size.parts}["process"] == parts.PROCESS_BYTES
