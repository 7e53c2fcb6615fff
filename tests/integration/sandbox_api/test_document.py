"""Requests made from the API's own document: whatever is sent, no answer is an error of ours."""

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from sandbox_clients import KEY

from openforge.sandbox_manager.api.app import make_app
from openforge.sandbox_manager.api.serve import Api

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA = schemathesis.openapi.from_dict(make_app().openapi())
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
EXAMPLES = 12
_SHORT_S = 0.05


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
async def test_no_request_makes_an_error_of_ours(api: Api, shared_box: str, operation: Any) -> None:
    await asyncio.to_thread(_try, f"http://127.0.0.1:{api.port}", shared_box, operation)


def _try(url: str, box: str, operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def no_5xx(case: Any) -> None:
        _point_at(case, box)
        reply = case.call(base_url=url, headers={"X-API-Key": KEY}, timeout=60)
        assert reply.status_code < 500 or reply.status_code == 503, (case.as_curl_command(), reply.text)

    no_5xx()


def _point_at(case: Any, box: str) -> None:
    """At a sandbox that is there, and never waiting long: it is about what is asked, not how patiently."""
    if "sandbox_id" in (case.path_parameters or {}) and case.method != "DELETE":
        case.path_parameters["sandbox_id"] = box
    if isinstance(case.query, dict) and "timeout" in case.query:
        case.query["timeout"] = _SHORT_S
    if isinstance(case.body, dict) and "timeout_seconds" in case.body:
        case.body["timeout_seconds"] = 1
