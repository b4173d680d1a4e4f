"""What a managed server is told: its command with the grant filled in, and the cards that it may see."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.managed.engine import ManagedEngine
from penstock.processors.engines.managed.options import fill, memory_fraction, read_options, server_environment
from penstock.schemas.errors import InvalidRequest

VALUES = {"port": "8123", "model": "/m x/a.gguf", "memory_fraction": "0.2500"}


def test_the_command_is_a_list_or_one_line_or_the_source() -> None:
    listed = read_options("m", "/a", {"command": ["serve", "{model}"]})
    line = read_options("m", "/a", {"command": "serve '{model}' --x 'a b'"})
    source = read_options("m", "serve --port {port}", {})
    assert (listed.command, listed.model) == (("serve", "{model}"), "/a")
    assert line.command == ("serve", "{model}", "--x", "a b")
    assert (source.command, source.model) == (("serve", "--port", "{port}"), "")


def test_placeholders_are_filled_in_within_an_argument() -> None:
    assert fill("m", "--port={port}", VALUES) == "--port=8123"
    assert fill("m", "{model}", VALUES) == "/m x/a.gguf"  # stays one argument
    assert fill("m", '{{"a": {memory_fraction}}}', VALUES) == '{"a": 0.2500}'


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"command": []}, "needs a command"),
        ({"command": "serve 'half"}, "needs a command"),
        ({"command": ["serve", "{gpu}"]}, r"there is no \{gpu\} .* there are \{memory_fraction\}"),
        ({"command": ["serve", "{port!r}"]}, r"there is no \{port\}"),
        ({"command": ["serve", "{"]}, "for a brace"),
        ({"command": ["serve"], "env": {"A": "{nothing}"}}, r"there is no \{nothing\}"),
        ({"command": ["serve"], "env": "A=1"}, "options.env is a table"),
        ({"command": ["serve"], "devices": 0}, "at least 1"),
    ],
)
def test_what_is_wrong_is_said_with_the_cure(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_options("m", "/a", options)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_server_is_never_told_to_take_more_than_its_grant(granted: int, total: int) -> None:
    told = float(memory_fraction(granted, total))
    assert 0 <= told <= 1
    assert told * total <= granted
    assert told >= (min(1.0, granted / total) if total else 0.0) - 0.0001


def test_a_server_sees_the_cards_of_its_grant_and_nothing_of_penstock() -> None:
    ours = {"PATH": "/bin", "PENSTOCK_KAFKA__SASL_PASSWORD": "secret", "CUDA_VISIBLE_DEVICES": "2,GPU-ab,5"}
    env = server_environment(ours, ["cuda:1", "cuda:2"], {"HF_HOME": "/hf"})
    assert env == {
        "PATH": "/bin",
        "HF_HOME": "/hf",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-ab,5",
    }
    assert server_environment({}, ["cuda:1"], {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert server_environment({}, ["cpu"], {})["CUDA_VISIBLE_DEVICES"] == ""  # no card was granted
    assert server_environment({}, ["cuda:0"], {}, ["MIG-x"])["CUDA_VISIBLE_DEVICES"] == "MIG-x"


def test_a_server_takes_as_many_devices_as_it_says() -> None:
    options = {"command": ["serve"], "devices": 2}
    with pytest.raises(InvalidRequest, match="takes 2 devices and was granted 1"):
        ManagedEngine("m", "/a", options, devices=("cuda:0",), granted_bytes=30, total_bytes=40)
