"""Requests made from the routes' own document: whatever is sent, no answer is an error of ours."""

import asyncio
from typing import Any

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


async def test_no_request_makes_an_error_of_ours(proxy: ProxyAtWork) -> None:
    key = await proxy.key(turns=100_000, lives_s=3600)
    answered: dict[str, set[int]] = {}
    for operation in OPERATIONS:
        answered[operation.label] = await asyncio.to_thread(_try, proxy.settings.proxy_url, key, operation)
    assert all(200 in statuses for statuses in answered.values()), answered  # not only refusals were made


def _try(url: str, key: str, operation: Any) -> set[int]:
    """The statuses of the answers to some requests with the attempt's key."""
    statuses: set[int] = set()

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
        statuses.add(reply.status_code)

    no_5xx()
    return statuses
