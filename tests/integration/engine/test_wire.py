"""The engine's wire over real HTTP: the shapes of vLLM, and what becomes of a request whatever happens to it."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from engine_fixtures import ServedEngine, engine_over_http, publish
from reference_model import largest_difference, reference_logprobs

from openforge.models import tiny
from openforge.weights import Probe

END = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny(root / f"m{seed}", seed=seed) for seed in (0, 1)]


@pytest.fixture
async def engine(models: list[Path]) -> AsyncIterator[ServedEngine]:
    async with engine_over_http(models[0]) as served:
        yield served


def _text_ids(text: str) -> list[int]:
    """The ids of a text in the tiny tokenizer: three special tokens, then the bytes' letters in order."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [3 + letters.index(letter) for word, _ in spelled for letter in word]


async def _until_running(engine: ServedEngine, running: int, waiting: int = 0) -> None:
    deadline = time.monotonic() + 20
    while await engine.running() != (running, waiting):
        assert time.monotonic() < deadline, f"{await engine.running()} instead of {(running, waiting)}"
        await asyncio.sleep(0.01)


def _long(**params: object) -> dict[str, object]:
    return {"sampling_params": {"max_tokens": 1900, "ignore_eos": True, **params}}


async def test_an_answer_has_ids_logprobs_spans_and_usage(engine: ServedEngine, models: list[Path]) -> None:
    await engine.client.post("/update_weight_version", json={"new_version": "7"})
    answer = (await engine.generate([1, 50, 60], request_id="ep1-c1", return_token_ids=True)).json()
    choice = answer["choices"][0]
    assert answer["request_id"] == "generate-tokens-ep1-c1"
    assert answer["prompt_token_ids"] == [1, 50, 60]
    assert choice["finish_reason"] in {"length", "stop"}
    count = len(choice["token_ids"])
    cached = answer["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
    again = (await engine.generate([1, 50, 60])).json()
    assert 0 <= cached < again["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": count}]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    stated = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert largest_difference(stated, reference_logprobs(models[0], [1, 50, 60], choice["token_ids"])) < 1e-4


async def test_a_stream_gives_the_same_answer_in_pieces_and_the_spans_with_the_last(engine: ServedEngine) -> None:
    whole = (await engine.generate([1, 50, 60], sampling_params={"max_tokens": 30, "seed": 3})).json()["choices"][0]
    body = {"model": "policy", "token_ids": [1, 50, 60], "stream": True}
    body["sampling_params"] = {"max_tokens": 30, "seed": 3}
    async with engine.client.stream("POST", "/inference/v1/generate", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert data[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in data[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert [choice["weight_versions"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["weight_versions"] == whole["weight_versions"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


async def test_thirty_two_at_once_are_all_answered_truly(engine: ServedEngine, models: list[Path]) -> None:
    luck = random.Random(0)
    prompts = [[1, *(luck.randrange(3, 259) for _ in range(20 + 5 * (i % 4)))] for i in range(4)]
    answers = await asyncio.gather(
        *(
            engine.generate(prompts[i % 4], sampling_params={"max_tokens": 10 + i, "ignore_eos": True})
            for i in range(32)
        )
    )
    for i, answer in enumerate(answers):
        choice = answer.json()["choices"][0]
        assert len(choice["token_ids"]) == 10 + i
        stated = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert largest_difference(stated, reference_logprobs(models[0], prompts[i % 4], choice["token_ids"])) < 1e-4


async def test_stop_strings_ids_and_the_models_end_say_why(engine: ServedEngine) -> None:
    text = _text_ids("hello ```\n\n and more")
    forced = {"max_tokens": 99, "forced_token_ids": [*text, END]}
    stopped = (await engine.generate([1], sampling_params=forced | {"stop": ["```\n\n"]})).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "```\n\n")
    assert stopped["token_ids"] == text[: len("hello ```\n\n")]
    by_id = (await engine.generate([1], sampling_params=forced | {"stop_token_ids": [text[4]]})).json()["choices"][0]
    assert (by_id["finish_reason"], by_id["stop_reason"], by_id["token_ids"]) == ("stop", text[4], text[:5])
    ended = (await engine.generate([1], sampling_params=forced)).json()["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"], ended["token_ids"]) == ("stop", None, [*text, END])
    short = (await engine.generate([1], sampling_params=forced | {"max_tokens": 3})).json()["choices"][0]
    assert (short["finish_reason"], short["stop_reason"], len(short["token_ids"])) == ("length", None, 3)


async def test_the_context_window_bounds_prompt_and_answer(models: list[Path]) -> None:
    async with engine_over_http(models[0], context=32) as engine:
        assert (await engine.client.get("/v1/models")).json()["data"][0]["max_model_len"] == 32
        refused = await engine.generate([1] * 32)
        assert refused.status_code == 400
        assert "max_model_len is 32" in refused.json()["error"]["message"]
        cut = await engine.generate([1] * 30, sampling_params={"max_tokens": 500, "ignore_eos": True})
        assert len(cut.json()["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"model": "gpt"}, 404, "gpt"),
        ({"priority": 3}, 400, "priority"),
        ({"sampling_params": {"max_tokens": 3, "presence_penalty": 1}}, 400, "presence_penalty"),
        ({"sampling_params": {}}, 400, "max_tokens"),
        ({"sampling_params": {"max_tokens": 0}}, 400, "max_tokens = 0"),
        ({"sampling_params": {"max_tokens": 3, "temperature": -1}}, 400, "temperature"),
        ({"sampling_params": {"max_tokens": 3, "top_p": 0}}, 400, "top_p"),
        ({"sampling_params": {"max_tokens": 3, "top_k": -5}}, 400, "top_k"),
        ({"sampling_params": {"max_tokens": 3, "logprobs": 5}}, 400, "logprobs = 5"),
        ({"sampling_params": {"max_tokens": 3, "stop": [""]}}, 400, "stop"),
        ({"sampling_params": {"max_tokens": 3, "forced_token_ids": []}}, 400, "forced_token_ids"),
        ({"sampling_params": {"max_tokens": 3, "forced_token_ids": [400]}}, 400, "400"),
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [1, 259]}, 400, "259"),
        ({"token_ids": "hello"}, 400, "token_ids"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    engine: ServedEngine, change: dict[str, object], status: int, named: str
) -> None:
    body = {"model": "policy", "token_ids": [1, 2], "sampling_params": {"max_tokens": 3}} | change
    refused = await engine.client.post("/inference/v1/generate", json=body)
    assert refused.status_code == status
    assert named in refused.json()["error"]["message"]


async def test_broken_json_is_a_bad_request(engine: ServedEngine) -> None:
    assert (await engine.client.post("/inference/v1/generate", content=b'{"model": "\xff')).status_code == 400
    assert (await engine.client.post("/inference/v1/generate", content=b"[]")).status_code == 400


async def test_before_the_first_weights_everything_answers_503(models: list[Path]) -> None:
    async with engine_over_http(None) as engine:
        for path in ("/health", "/v1/models", "/weight_info"):
            assert (await engine.client.get(path)).status_code == 503
        assert (await engine.generate([1])).status_code == 503
        assert (await engine.generate([1], sampling_params={"stop": ["."]})).status_code == 503
        assert (await engine.client.post("/pause?mode=keep")).status_code == 503
        await engine.backend.apply(models[0], "", 0)
        assert (await engine.client.get("/health")).status_code == 200
        assert (await engine.generate([1])).status_code == 200


async def test_a_client_that_goes_away_ends_its_request(engine: ServedEngine) -> None:
    waiting = asyncio.create_task(engine.generate([1], **_long()))
    await _until_running(engine, 1)
    waiting.cancel()
    await _until_running(engine, 0)
    body = {"model": "policy", "token_ids": [1], "stream": True, **_long()}
    async with engine.client.stream("POST", "/inference/v1/generate", json=body) as response:
        async for _ in response.aiter_lines():
            break
    await _until_running(engine, 0)


async def test_an_aborted_request_gives_what_it_has(engine: ServedEngine) -> None:
    one, other = (
        asyncio.create_task(engine.generate([1, token], request_id=name, **_long()))
        for name, token in (("a", 5), ("b", 6))
    )
    await _until_running(engine, 2)
    await asyncio.sleep(0.1)
    done = await engine.client.post("/abort_requests", json={"request_ids": ["generate-tokens-a"]})
    assert done.json() == {"aborted": 1}
    choice = (await one).json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == choice["weight_versions"][-1]["end"]
    assert (await engine.client.post("/abort_requests", json={})).json() == {"aborted": 1}
    assert (await other).json()["choices"][0]["finish_reason"] == "abort"


async def test_pause_keep_freezes_and_resume_goes_on(engine: ServedEngine) -> None:
    running = asyncio.create_task(engine.generate([1, 5], **_long(max_tokens=300)))
    await _until_running(engine, 1)
    assert (await engine.client.post("/pause?mode=keep")).json() == {"status": "paused"}
    queued = asyncio.create_task(engine.generate([1, 6]))
    await _until_running(engine, 1, 1)
    await asyncio.sleep(0.3)
    assert not running.done()
    assert not queued.done()
    assert (await engine.client.get("/is_paused")).json() == {"is_paused": True}
    await engine.client.post("/resume")
    assert len((await running).json()["choices"][0]["token_ids"]) == 300
    assert (await queued).status_code == 200


async def test_pause_abort_and_pause_wait_empty_the_engine(engine: ServedEngine) -> None:
    running = asyncio.create_task(engine.generate([1, 5], **_long()))
    await _until_running(engine, 1)
    await engine.client.post("/pause")
    assert (await running).json()["choices"][0]["finish_reason"] == "abort"
    await engine.client.post("/resume")
    running = asyncio.create_task(engine.generate([1, 5], **_long(max_tokens=100)))
    await _until_running(engine, 1)
    await engine.client.post("/pause?mode=wait")
    assert await engine.running() == (0, 0)
    assert (await running).json()["choices"][0]["finish_reason"] == "length"
    assert (await engine.client.post("/pause?mode=sideways")).status_code == 400


async def test_prompt_logprobs_score_a_given_text(engine: ServedEngine, models: list[Path]) -> None:
    ids = [1, 30, 40, 50, 2]
    params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.3}
    answer = (await engine.generate(ids, sampling_params=params)).json()["prompt_logprobs"]
    assert answer[0] is None
    stated = [entry[str(token)]["logprob"] for entry, token in zip(answer[1:], ids[1:], strict=True)]
    assert largest_difference(stated, reference_logprobs(models[0], ids[:1], ids[1:])) < 1e-4


async def test_weights_change_in_flight_and_each_token_says_which_sampled_it(
    engine: ServedEngine, models: list[Path], tmp_path: Path
) -> None:
    versions = [publish(tmp_path, model, version) for version, model in enumerate(models)]
    await engine.backend.apply(versions[0].path, versions[0].digest, 0)
    prompts = [[1, *range(10, 60)], [1, *range(10, 60)], [1, *range(10, 40), 7]]
    running = [asyncio.create_task(engine.generate(prompt, **_long(max_tokens=400))) for prompt in prompts]
    await _until_running(engine, 3)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(versions[1].path)}}
    assert (await engine.client.post("/collective_rpc", json=reload)).status_code == 200
    assert (await engine.client.get("/weight_info")).json() == {"weight_version": "1"}
    for prompt, task in zip(prompts, running, strict=True):
        choice = (await task).json()["choices"][0]
        spans = choice["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 400)
        switch = spans[1]["start"]
        expected = reference_logprobs(models[0], prompt, choice["token_ids"])[:switch]
        expected += reference_logprobs(models[1], prompt, choice["token_ids"])[switch:]
        stated = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert largest_difference(stated, expected) < 1e-4


async def test_bad_weights_are_refused_and_the_old_ones_go_on(
    engine: ServedEngine, models: list[Path], tmp_path: Path
) -> None:
    good = publish(tmp_path, models[0], 5)
    await engine.backend.apply(good.path, good.digest, 5)
    lying = Probe(prompt_ids=(1, 40), token_ids=(50,), logprobs=(-0.25,))
    wrong_probe = publish(tmp_path, models[1], 6, probe=lying).path
    cut = publish(tmp_path, models[1], 7).path
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    other_shape = publish(tmp_path, tiny(tmp_path / "other", hidden=32), 8).path
    for path, named in (
        (wrong_probe, "probe"),
        (cut, "bytes"),
        (other_shape, "another shape"),
        (tmp_path / "absent", "config.json"),
    ):
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        refused = await engine.client.post("/collective_rpc", json=reload)
        assert refused.status_code == 500
        assert named in refused.json()["error"]["message"]
        assert (await engine.client.get("/weight_info")).json() == {"weight_version": "5"}
        choice = (await engine.generate([1, 9], sampling_params={"max_tokens": 4})).json()["choices"][0]
        stated = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert largest_difference(stated, reference_logprobs(models[0], [1, 9], choice["token_ids"])) < 1e-4


async def test_the_event_loop_answers_while_the_engine_computes(engine: ServedEngine) -> None:
    running = [asyncio.create_task(engine.generate([1, 5 + i], **_long())) for i in range(32)]
    await _until_running(engine, 32)
    slowest = 0.0
    for _ in range(20):
        began = time.monotonic()
        await engine.client.get("/health")
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 1.0
    await engine.client.post("/abort_requests", json={})
    await asyncio.gather(*running)


async def test_a_reset_prefix_cache_is_empty(engine: ServedEngine) -> None:
    async def hits() -> str:
        text = (await engine.client.get("/metrics")).text
        return next(line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total{"))

    prompt = list(range(3, 60))
    await engine.generate(prompt)
    await engine.client.post("/reset_prefix_cache")
    before = await hits()
    await engine.generate(prompt)
    assert await hits() == before
    await engine.generate(prompt)
    assert await hits() != before


async def test_a_port_that_is_taken_is_a_bad_setting(engine: ServedEngine) -> None:
    from openforge.engine.http import bind
    from openforge.service import BadSettings

    with pytest.raises(BadSettings, match=r"OPENFORGE_ENGINE_URL.*use a free port"):
        bind(engine.url)
    with pytest.raises(BadSettings, match="http://HOST:PORT"):
        bind("127.0.0.1:99")
    assert isinstance(engine.client, httpx.AsyncClient)


async def test_an_answer_that_has_to_match_a_schema_does_and_bad_schemas_are_refused(engine: ServedEngine) -> None:
    wanted = {"json": json.dumps({"enum": ["yes", "no"]})}
    params = {"max_tokens": 20, "structured_outputs": wanted, "stop_token_ids": [END]}
    choice = (await engine.generate([1, 50, 60], sampling_params=params)).json()["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    said = choice["token_ids"]
    assert said in ([*_text_ids('"yes"'), END], [*_text_ids('"no"'), END])
    assert [index for index, logprob in enumerate(logprobs) if logprob < 0.0] == [1]
    params["structured_outputs"] = {"json": '{"type": 3}'}
    refused = await engine.generate([1], sampling_params=params)
    assert refused.status_code == 400
    assert "structured_outputs cannot be followed" in refused.text
