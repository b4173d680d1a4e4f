"""Sizes from a GGUF file's header."""

from pathlib import Path

import pytest

from penstock.processors.models import gguf_header, parts
from penstock.schemas.errors import InvalidRequest


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_embedding_length(64)
    writer.add_context_length(256)
    writer.add_token_list([f"t{number}" for number in range(100)])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.truths", [True, False])
    writer.add_bool("some.flag", True)
    writer.add_tensor("a", np.zeros((10, 7), dtype=np.float32))
    writer.add_tensor("b", np.zeros(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header_gives_parameters_and_shape(gguf_file: Path) -> None:
    header = gguf_header.read(gguf_file)
    assert header.parameters == 75
    assert header.config() == {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 256,
        "vocab_size": 100,
    }
    assert header.metadata["some.numbers.length"] == 3
    assert header.metadata["some.flag"] is True


def test_memory_need_of_a_gguf_file(gguf_file: Path) -> None:
    options = {"cache_tokens": 320, "slots": 2, "dtype": "float32"}
    found = {part.name: part.bytes for part in parts.memory_parts(gguf_file, "text", options)}
    assert found["weights"] == 75 * 4, "it is loaded dequantised"
    assert found["token cache"] == 320 * 2 * 3 * 2 * 8 * 4
    assert found["process"] == parts.PROCESS_BYTES


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"GGUF" + b"\xff" * 40, b"PK\x03\x04 not this"])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest):
        gguf_header.read(path)
