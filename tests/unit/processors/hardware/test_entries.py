"""`[[devices]]` tables that cannot be meant are refused, and the message says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.processors.hardware.entries import DeviceSection, check_entries

SIM = {"kind": "simulated", "name": "sim0", "total_bytes": 100}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "tpu"}, "'cpu', 'cuda' or 'simulated'"),
        ({"kind": "simulated", "total_bytes": 5}, "a simulated device needs name"),
        ({"kind": "simulated", "name": "x"}, "a simulated device needs total_bytes"),
        ({"kind": "cuda", "total_bytes": 5}, "total_bytes: only simulated devices have that; cuda is measured"),
        ({"kind": "cpu", "foreign_file": "x"}, "foreign_file: only simulated devices have that"),
        ({"kind": "cpu", "name": "cpu1"}, "main memory is called cpu, not cpu1"),
        ({**SIM, "foreign": [{"after_s": 1, "bytes": 1}], "foreign_file": "x"}, "exclude each other"),
        ({**SIM, "foreign": [{"after_s": 2, "bytes": 1}, {"after_s": 2, "bytes": 3}]}, "in the order of after_s"),
        ({**SIM, "foreign": [{"after_s": -1, "bytes": 1}]}, "greater than or equal to 0"),
        ({**SIM, "limit_bytes": -1}, "greater than or equal to 0"),
        ({**SIM, "size": 7}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_meant(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        DeviceSection.model_validate(fields)


@pytest.mark.parametrize(
    "entries",
    [
        [SIM, {**SIM, "total_bytes": 7}],
        [{"kind": "cpu"}, {"kind": "cpu", "name": "cpu"}],
        [{"kind": "cuda"}, {"kind": "cuda", "limit_bytes": 5}],
        [{"kind": "cuda", "name": "cuda:0"}, {"kind": "cuda", "name": "cuda:0", "enabled": False}],
    ],
)
def test_two_tables_for_one_device(entries: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="two tables of devices tell of"):
        check_entries([DeviceSection.model_validate(one) for one in entries])


def test_a_fleet_that_can_be_meant() -> None:
    tables = [{"kind": "cuda"}, {"kind": "cuda", "name": "cuda:1"}, {"kind": "cpu", "enabled": False}, SIM]
    check_entries([DeviceSection.model_validate(one) for one in tables])
