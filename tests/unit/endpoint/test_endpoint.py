"""Calls to somebody else's server, against a real HTTP server."""

import asyncio
import time
from typing import Any

import pytest
from stub_chat import Reply, scripted, stub_chat

from openforge.endpoint import Address, BadEndpoint, Endpoint, EndpointBroken, EndpointRefused

BODY = {"messages": [{"role": "user", "content": "Hello"}]}


def refused(status: int, code: str = "", message: str = "no") -> Reply:
    return status, {"error": {"code": code, "message": message}}


def at(url: str, **more: Any) -> Address:
    return Address(section="engine", url=url, model="m", **more)


async def test_what_may_work_later_is_asked_again_and_the_model_is_put_in() -> None:
    with stub_chat(scripted(refused(429), refused(503), "Hi.")) as chat:
        async with Endpoint(at(chat.base_url), pauses_s=(0.01, 0.01)) as endpoint:
            said = await endpoint.chat(BODY | {"model": "policy"})
    assert said["choices"][0]["message"]["content"] == "Hi."
    assert [request["model"] for request in chat.requests] == ["m"] * 3
    assert set(chat.keys) == {""}


async def test_it_gives_up_after_its_pauses() -> None:
    with stub_chat(scripted(refused(500, message="on fire"))) as chat:
        async with Endpoint(at(chat.base_url), pauses_s=(0.01,)) as endpoint:
            with pytest.raises(EndpointBroken, match="the endpoint answered 500: on fire"):
                await endpoint.chat(BODY)
    assert len(chat.requests) == 2


async def test_what_will_not_work_is_asked_once_and_keeps_its_code() -> None:
    with stub_chat(scripted(refused(400, "context_length_exceeded", "too long"))) as chat:
        async with Endpoint(at(chat.base_url)) as endpoint:
            with pytest.raises(EndpointRefused, match="too long") as error:
                await endpoint.chat(BODY)
    assert (error.value.status, error.value.code, len(chat.requests)) == (400, "context_length_exceeded", 1)


@pytest.mark.parametrize(("status", "code"), [(401, ""), (403, "model_not_found"), (404, "model_not_found")])
async def test_a_key_or_a_model_that_it_refuses_is_refused_for_good(status: int, code: str) -> None:
    with stub_chat(scripted(refused(status, code))) as chat:
        async with Endpoint(at(chat.base_url)) as endpoint:
            with pytest.raises(BadEndpoint, match=r"engine\.(key_env|model) = "):
                await endpoint.chat(BODY)
    assert len(chat.requests) == 1


@pytest.mark.parametrize("status", [403, 404])
async def test_what_is_refused_of_one_call_says_nothing_of_the_next(status: int) -> None:
    with stub_chat(scripted(refused(status, "moderated", "not this one"), "Hi.")) as chat:
        async with Endpoint(at(chat.base_url)) as endpoint:
            with pytest.raises(EndpointRefused, match=f"the endpoint answered {status}: not this one") as error:
                await endpoint.chat(BODY)
            assert not isinstance(error.value, BadEndpoint)
            assert (error.value.status, error.value.code) == (status, "moderated")
            assert (await endpoint.chat(BODY))["choices"][0]["message"]["content"] == "Hi."


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_one_that_lists_no_models_and_refuses_even_a_greeting_is_refused_at_its_check(status: int) -> None:
    with stub_chat(scripted(refused(status))) as chat:
        async with Endpoint(at(chat.base_url)) as endpoint:
            with pytest.raises(BadEndpoint, match=r"engine\.(key_env|model) = "):
                await endpoint.check()
    assert len(chat.requests) == 1


async def test_no_more_calls_are_open_than_it_is_told() -> None:
    def slow(_: dict[str, Any]) -> str:
        time.sleep(0.05)
        return "Hi."

    with stub_chat(slow) as chat:
        async with Endpoint(at(chat.base_url), at_once=3) as endpoint:
            await asyncio.gather(*(endpoint.chat(BODY) for _ in range(12)))
    assert (len(chat.requests), chat.most_at_once) == (12, 3)


async def test_a_key_comes_from_the_environment_and_an_unset_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadEndpoint, match=r"engine\.key_env = 'THEIR_KEY': no such environment variable is set"):
        Endpoint(at("http://127.0.0.1:9", key_env="THEIR_KEY"))
    monkeypatch.setenv("THEIR_KEY", " k1\n")
    with stub_chat(scripted("Hi.")) as chat:
        chat.models = ["m"]
        async with Endpoint(at(chat.base_url, key_env="THEIR_KEY")) as endpoint:
            await endpoint.check()
            await endpoint.chat(BODY)
    assert chat.keys == ["Bearer k1"]
