"""Errors of failed loads: what callers hear, and what operators see beside it."""

from __future__ import annotations

import json

import pytest

from penstock.processors.core.fleet.ledger import CannotLoad, OutOfMemory
from penstock.processors.engines.process.causes import cause_of
from penstock.processors.models.manager import load_error
from penstock.schemas.errors import EngineFailed, InvalidRequest, PenstockError, error_body

SOURCE = "/models/chat"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError("no file named model.safetensors in /models/chat"), "OSError: no file named model.safetensors in "
         "/models/chat"),
        (FileNotFoundError(2, "No such file", "/models/chat/config.json"),
         "FileNotFoundError: [Errno 2] No such file: '/models/chat/config.json'"),
        (FileNotFoundError(2, "No such file", "/home/me/my cache/libx.so"),
         "FileNotFoundError: [Errno 2] No such file: '…/libx.so'"),
        (RuntimeError("in /opt/venv/lib/torch/nn.py:12, and /models/chat-2/x, (/etc/passwd)"),
         "RuntimeError: in …/nn.py:12, and …/x, (…/passwd)"),
        (ValueError("see ~/secrets/key and\n\n  the next line"), "ValueError: see …/key and the next line"),
        (ValueError("owner/name is no folder; 1/2 of it"), "ValueError: owner/name is no folder; 1/2 of it"),
        (OSError("https://me:pass@host/v1/models?token=abc refused"), "OSError: https://host/v1/models refused"),
        (OSError("file:///etc/hosts and http://host"), "OSError: …/hosts and http://host"),
        (RuntimeError(""), "RuntimeError"),
        (InvalidRequest("the model /models/chat is no folder"), "the model /models/chat is no folder"),
    ],
)  # fmt: skip
def test_the_cause_names_type_and_message_without_foreign_paths(error: Exception, cause: str) -> None:
    assert cause_of(error, SOURCE) == cause


def test_a_long_cause_is_cut() -> None:
    assert len(cause_of(RuntimeError("tensor " * 1000), SOURCE)) < 450


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError("/models/chat is empty"), EngineFailed), (InvalidRequest("/models/chat"), CannotLoad)]
)
def test_callers_are_told_that_it_failed_and_operators_why(error: Exception, kind: type[PenstockError]) -> None:
    told = load_error("chat", SOURCE, error)
    assert type(told) is kind
    assert told.cause == cause_of(error, SOURCE)
    assert "/models" not in json.dumps(error_body(told))


def test_an_error_of_an_engine_keeps_its_kind_and_message() -> None:
    error = OutOfMemory("chat could not be loaded: it ran out of memory")
    told = load_error("chat", SOURCE, error)
    assert told is error
    assert told.cause == "chat could not be loaded: it ran out of memory"
    fuller = EngineFailed("chat could not be loaded", cause="OSError: /models/chat/a is cut off")
    assert load_error("chat", SOURCE, fuller).cause == "OSError: /models/chat/a is cut off"
