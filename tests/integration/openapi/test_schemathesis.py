"""What fits the OpenAPI document, and what nearly does, is sent to a real gateway: no 500, and answers as declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 4
"""Of each route and mode; `make test` should take seconds for it."""
TIMEOUT_S = 20
CONFORMING = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
FEW = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["positive", "negative"])
def test_no_body_and_no_parameter_makes_a_500(url: str, mode: GenerationMode) -> None:
    seen: dict[str, list[int]] = {}
    for operation in operations(url):

        def ask(case: Case) -> None:
            answer = case.call(base_url=url, timeout=TIMEOUT_S)
            seen.setdefault(case.operation.label, []).append(answer.status_code)
            case.validate_response(answer, checks=CONFORMING)

        FEW(given(case=operation.as_strategy(generation_mode=mode))(ask))()
    assert len(seen) > 30


def operations(url: str) -> Iterator[Any]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        yield found.ok()
