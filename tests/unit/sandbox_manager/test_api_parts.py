"""The parts of the sandbox API that decide, without a server."""

import asyncio

import pytest

from openforge.bus import BadSettings
from openforge.sandbox_manager.api.amounts import amount
from openforge.sandbox_manager.api.connection import Connection, Delivery
from openforge.sandbox_manager.api.document import PLACE, document
from openforge.sandbox_manager.api.keys import ApiKeys


def connection(requests: int = 1) -> Connection:
    made = Connection()
    made.requests = requests
    return made


@pytest.mark.parametrize(("text", "value"), [("4", 4.0), ("2000m", 2.0), ("16Gi", 16 * 2**30), ("1.5k", 1500.0)])
def test_amounts_are_read_as_kubernetes_writes_them(text: str, value: float) -> None:
    assert amount("cpu", text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "1e309", "4 cores", "1Ei"])
def test_an_amount_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="memory = "):
        amount("memory", text)


async def test_an_answer_that_was_not_written_when_the_client_left_is_certainly_lost() -> None:
    line = connection()
    delivery = Delivery(line)
    assert not delivery.certainly_lost
    line.closed()
    await asyncio.sleep(0.01)
    delivery.written()
    assert delivery.certainly_lost


async def test_a_connection_that_goes_on_has_delivered_and_one_that_closes_probably_not() -> None:
    kept, cut = connection(), connection()
    first, second = Delivery(kept), Delivery(cut)
    for delivery in (first, second):
        delivery.written()
    kept.requests += 1
    await asyncio.sleep(0.01)
    for line in (kept, cut):
        line.closed()
    assert not first.probably_lost_within(10)
    assert second.probably_lost_within(10)
    assert not second.certainly_lost


async def test_what_we_closed_ourselves_proves_nothing() -> None:
    line = connection()
    delivery = Delivery(line)
    delivery.written()
    line.closed_by_us = True
    line.closed()
    assert not delivery.probably_lost_within(10)


def test_keys_open_what_they_say() -> None:
    keys = ApiKeys(["everything-key", "key-of-anna=anna", "key-of-anna-to-look=anna/read"])
    everything, anna, looks = (keys.find(s) for s in ("everything-key", "key-of-anna", "key-of-anna-to-look"))
    assert everything is not None
    assert anna is not None
    assert looks is not None
    assert everything.opens("anybody")
    assert (anna.opens("anna"), anna.opens("bert"), looks.scope) == (True, False, "read")
    assert keys.find("key-of-ann") is None


@pytest.mark.parametrize("entry", ["short", "long-enough=anna/write"])
def test_a_key_that_cannot_be_meant_is_refused_without_showing_it(entry: str) -> None:
    with pytest.raises(BadSettings) as refused:
        ApiKeys([entry])
    assert entry.partition("=")[0] not in str(refused.value)


def test_the_document_in_docs_is_what_the_code_says() -> None:
    assert PLACE.read_text() == document(), "run python -m openforge.sandbox_manager.api.document"
