"""Requests made from the routes' own document: whatever is sent, no answer is an error of ours."""

import asyncio
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from proxy_fixtures import ProxyAtWork

from openforge.proxy.document import PLACE, document, openapi
from openforge.proxy.routes import route_of, service_at

SCHEMA = schemathesis.openapi.from_dict(openapi())
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
EXAMPLES = 25


def test_the_document_in_docs_is_that_of_the_code() -> None:
    assert PLACE.read_text() == document(), "run python -m openforge.proxy.document"


def test_every_documented_route_is_served() -> None:
    for path, methods in openapi()["paths"].items():
        for method in methods:
            assert service_at(method.upper(), route_of(path.removeprefix("/ep/{attempt}"))), path


async def test_the_example_of_every_documented_call_is_answered(proxy: ProxyAtWork) -> None:
    key = await proxy.key(turns=100)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=proxy.settings.proxy_url, headers=headers, timeout=60) as client:
        for path, methods in openapi()["paths"].items():
            for method, operation in methods.items():
                body = operation.get("requestBody", {"content": {"application/json": {"example": None}}})
                place = path.format(attempt="e-0.0", model="m")
                reply = await client.request(method, place, json=body["content"]["application/json"]["example"])
                assert reply.status_code == 200, (path, reply.text)


async def test_no_request_makes_an_error_of_ours(proxy: ProxyAtWork) -> None:
    key = await proxy.key(turns=100_000, lives_s=3600)
    for operation in OPERATIONS:
        await asyncio.to_thread(_try, proxy.settings.proxy_url, key, operation)


def _try(url: str, key: str, operation: Any) -> None:
    """Some requests with the attempt's key."""

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
        case.path_parameters["attempt"] = "e-0.0"
        reply = case.call(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert reply.status_code < 500, (case.as_curl_command(), reply.text)

    no_5xx()
