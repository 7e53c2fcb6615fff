"""The driver and a real vLLM server on the CPU, with the real model in float32. `make test-vllm`.

One server serves all tests, in their order: it takes half a minute to start.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from broadcasting import sender
from engine_fixtures import publish
from reference_model import largest_difference, reference_logprobs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from vllm_world import NEAR, PROMPT, Served, spans, stated, vllm_serving

from openforge.chat.chatml import ChatMLHermes
from openforge.chat.contract import Message, Tool, ToolChoice
from openforge.models import get
from openforge.weights import BadWeights, Probe, write_weights
from openforge.wire.generate import StructuredOutputs

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

WEATHER = Tool(
    name="weather",
    description="The weather of a city",
    parameters={"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    root = tmp_path_factory.mktemp("vllm")
    model, other = get("smollm2-135m"), _other(get("smollm2-135m"), root / "other")
    async with vllm_serving(publish(root / "weights", model, 0), root, [model, other, model], "gloo") as served:
        yield served


def _other(model: Path, folder: Path) -> Path:
    """The same model with other weights, plainly so."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    tensors = {
        name: (tensor.float() * (1 + 0.05 * torch.randn(tensor.shape))).to(tensor.dtype)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_answers_have_the_logprobs_of_a_full_recomputation_and_the_version_that_sampled_them(
    served: Served,
) -> None:
    for temperature in (1.0, 0.7):
        answer = await served.generate(PROMPT, temperature=temperature, ignore_eos=True)
        ids = answer.choices[0].token_ids
        expected = reference_logprobs(served.models[0], PROMPT, ids, temperature=temperature)
        assert largest_difference(stated(answer), expected) < NEAR
        assert spans(answer) == [("0", 0, len(ids))]


async def test_a_seed_draws_the_same_however_many_steps_the_prompt_took(served: Served) -> None:
    """A prompt in pieces, beside others, and then out of the cache but for its end."""
    prompts = [[*PROMPT, *(400 + (position + 7 * index) % 900 for position in range(600))] for index in range(4)]
    answers = await asyncio.gather(
        *(served.generate(ids, seed=index, max_tokens=8, ignore_eos=True) for index, ids in enumerate(prompts))
    )
    for index, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        again = await served.generate(ids, seed=index, max_tokens=8, ignore_eos=True)
        assert again.choices[0].token_ids == answer.choices[0].token_ids
        assert len(stated(answer)) == 8


async def test_guided_answers_match_a_schema_and_the_grammar_of_tool_calls(served: Served) -> None:
    tokenizer = Tokenizer.from_file(str(served.models[0] / "tokenizer.json"))
    renderer = ChatMLHermes(tokenizer)
    ids = renderer.render([Message(role="user", content="How is the weather in Rome?")], [WEATHER])
    guide = renderer.guide([WEATHER], ToolChoice(mode="required"), parallel=False, schema=b"")
    assert guide is not None
    called = await served.generate(ids, max_tokens=64, structured_outputs=StructuredOutputs(grammar=guide.grammar))
    parsed = renderer.parse(called.choices[0].token_ids, [WEATHER])
    assert [call.name for call in parsed.tool_calls] == ["weather"]
    assert json.loads(parsed.tool_calls[0].arguments)["city"] in ("Paris", "Rome")
    assert 0.0 in stated(called)  # the tokens that had no alternative
    schema = json.dumps({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})
    answered = await served.generate(ids, max_tokens=64, structured_outputs=StructuredOutputs(json=schema))
    assert json.loads(renderer.text(answered.choices[0].token_ids))["n"] in (1, 2)


async def test_requests_are_aborted_by_name_and_by_hanging_up(served: Served) -> None:
    asked = asyncio.create_task(served.generate(PROMPT, "a", max_tokens=700, ignore_eos=True))
    await served.until_running(1)
    await served.client.post("/abort_requests", json={"request_ids": ["generate-tokens-a"]})
    choice = (await asked).choices[0]
    assert choice.finish_reason == "abort"
    assert len(choice.token_ids) < 700
    left = asyncio.create_task(served.generate(PROMPT, "b", max_tokens=700, ignore_eos=True))
    await served.until_running(1)
    left.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await left
    await served.until_running(0)


async def test_weights_change_in_flight_and_nothing_that_old_weights_computed_is_used_again(served: Served) -> None:
    await _change_in_flight(served, 1, "")


async def test_a_learner_broadcasts_weights_into_the_running_server(served: Served) -> None:
    child = served.driver._child
    with sender(served.root / "weights", bucket_bytes=32 << 20) as stream:
        await _change_in_flight(served, 2, stream)
    assert served.driver._child is child


async def _change_in_flight(served: Served, version: int, stream: str) -> None:
    old, new = str(version - 1), str(version)
    written = publish(served.root / "weights", served.models[version], version)
    tasks = [[*PROMPT, 500 + index] for index in range(2)]
    asked = [asyncio.create_task(served.generate(ids, max_tokens=300, ignore_eos=True)) for ids in tasks]
    await served.until_running(2)
    outcome = await served.driver.apply(written.path, written.digest, version, stream)
    assert outcome.probe_error < NEAR
    for ids, answer in zip(tasks, await asyncio.gather(*asked), strict=True):
        sampled, told = answer.choices[0].token_ids, stated(answer)
        (before, _, change), (after, start, end) = spans(answer)
        assert (before, after, start, end) == (old, new, change, 300)
        assert largest_difference(told[:change], served.truth(version - 1, ids, sampled[:change])) < NEAR
        assert largest_difference(told[change:], served.truth(version, ids, sampled)[change:]) < NEAR
    again = await served.generate(PROMPT, ignore_eos=True)  # its prefix was cached under the old weights
    assert spans(again) == [(new, 0, 16)]
    assert largest_difference(stated(again), served.truth(version, PROMPT, again.choices[0].token_ids)) < NEAR


async def test_weights_that_vllm_cannot_load_cost_the_server_and_the_version_before_is_served_again(
    served: Served,
) -> None:
    tensors = load_file(served.models[1] / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    broken = write_weights(
        served.root / "weights",
        tensors,
        config_dir=served.models[1],
        version=3,
        incarnation=0,
        probe=Probe(prompt_ids=(1, 2), token_ids=(3,), logprobs=(-1.0,)),
        dtype="float32",
    )
    before = served.driver._child
    assert before is not None
    members = _group(before.pid)
    assert len(members) > 1  # a vLLM server is several processes
    with pytest.raises(BadWeights, match="could not serve"):
        await served.driver.apply(broken.path, broken.digest, 3)
    assert not _group(before.pid)
    assert await served.version() == "2"
    answer = await served.generate(PROMPT)
    assert largest_difference(stated(answer), served.truth(2, PROMPT, answer.choices[0].token_ids)) < NEAR


def _group(leader: int) -> set[int]:
    """The living processes of a process group."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.add(int(stat.parent.name))
    return found
