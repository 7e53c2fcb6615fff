"""Every route has a dialect."""

import pytest

from openforge.chat import chat_completions, gemini, messages
from openforge.proxy.routes import Count, Generate, Models, route_of, service_at, speaker_at


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("v1/chat/completions", "chat/completions"),
        ("v1/v1/chat/completions", "chat/completions"),
        ("/v1//v1/models/", "models"),
        ("chat/completions", "chat/completions"),
        ("v1beta/models/m:generateContent", "v1beta/models/m:generateContent"),
        ("v1", ""),
        ("", ""),
    ],
)
def test_the_version_in_front_does_not_count(path: str, route: str) -> None:
    assert route_of(path) == route


def test_a_service_is_found_by_method_and_route() -> None:
    assert isinstance(service_at("POST", "chat/completions"), Generate)
    assert isinstance(service_at("GET", "models"), Models)
    assert service_at("GET", "chat/completions") is None
    assert service_at("POST", "embeddings") is None


@pytest.mark.parametrize(
    ("route", "service"),
    [
        ("messages", Generate(messages)),
        ("messages/count_tokens", Count(messages, messages.counted)),
        ("v1beta/models/m:generateContent", Generate(gemini)),
        ("v1beta/models/rec/m-2.5:streamGenerateContent", Generate(gemini)),
        ("models/m:countTokens", Count(gemini, gemini.counted)),
        ("messages/batches", None),
        ("v1beta/models/m:embedContent", None),
    ],
)
def test_messages_and_gemini_have_their_routes(route: str, service: Generate | Count | None) -> None:
    assert service_at("POST", route) == service
    assert speaker_at(route) is (messages if route.startswith("messages") else gemini)


def test_what_nobody_serves_is_refused_in_words_of_chat_completions() -> None:
    assert speaker_at("embeddings") is chat_completions
