"""The driver and a real vLLM server on the CPU, with the real model in float32. `make test-vllm`.

One server serves all tests, in their order: it takes half a minute to start.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio
import torch
from broadcasting import sender
from engine_fixtures import publish
from reference_model import largest_difference, reference_logprobs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from openforge.bus.server import free_port
from openforge.chat.chatml import ChatMLHermes
from openforge.chat.contract import Message, Tool, ToolChoice
from openforge.engine.settings import Settings
from openforge.engine.vllm import VllmBackend
from openforge.models import get
from openforge.runs import RunConfig
from openforge.runs.config import EngineSection, EnvironmentSection, ModelSection, RunSection
from openforge.weights import BadWeights, Probe, write_weights
from openforge.wire.generate import GenerateRequest, GenerateResponse, SamplingParams, StructuredOutputs

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

NEAR = 1e-3
PROMPT = [1, *range(2000, 2300)]  # longer than a cache block, so that a stale prefix would show
WEATHER = Tool(
    name="weather",
    description="The weather of a city",
    parameters={"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
)


class Served:
    """A driver with its server, and the model folders behind its versions."""

    def __init__(self, driver: VllmBackend, client: httpx.AsyncClient, root: Path, models: list[Path]) -> None:
        self.driver, self.client, self.root, self.models = driver, client, root, models

    async def generate(self, ids: list[int], request_id: str = "", **params: object) -> GenerateResponse:
        asked = GenerateRequest(
            model="policy",
            token_ids=ids,
            request_id=request_id,
            sampling_params=SamplingParams(**({"max_tokens": 16, "seed": 1} | params)),  # type: ignore[arg-type]
        )
        answer = await self.client.post("/inference/v1/generate", json=msgspec.to_builtins(asked))
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=GenerateResponse)

    async def running(self) -> int:
        text = (await self.client.get("/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return int(float(line.rsplit(" ", 1)[1]))

    async def until_running(self, wanted: int) -> None:
        async with asyncio.timeout(60):
            while await self.running() != wanted:
                await asyncio.sleep(0.05)

    async def version(self) -> str:
        return str((await self.client.get("/weight_info")).json()["weight_version"])

    def truth(self, version: int, ids: list[int], answer: list[int]) -> list[float]:
        return reference_logprobs(self.models[version], ids, answer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    root = tmp_path_factory.mktemp("vllm")
    model, other = get("smollm2-135m"), _other(get("smollm2-135m"), root / "other")
    models = [model, other, model]
    settings = Settings(
        run="r",
        engine_url=f"http://127.0.0.1:{free_port()}",
        weight_call_timeout_s=120.0,
        vllm_python=os.environ.get("OPENFORGE_VLLM_PYTHON", ""),
    )
    config = RunConfig(
        run=RunSection(name="r", steps=1),
        model=ModelSection(path=str(models[0]), context=1024),
        engine=EngineSection(
            kind="vllm", dtype="float32", max_requests=16, vllm_args=("--enforce-eager",), weight_path="gloo"
        ),
        environment=EnvironmentSection(name="letters", harness="letters"),
    )
    driver = VllmBackend(settings, config)
    await driver.start()
    try:
        first = publish(root / "weights", models[0], 0)
        await driver.apply(first.path, first.digest, 0)
        async with httpx.AsyncClient(base_url=settings.engine_url, timeout=300.0) as client:
            yield Served(driver, client, root, models)
    finally:
        await driver.stop()


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


def _stated(answer: GenerateResponse) -> list[float]:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    return [entry.logprob for entry in logprobs.content]


def _spans(answer: GenerateResponse) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in answer.choices[0].weight_versions or []]


async def test_answers_have_the_logprobs_of_a_full_recomputation_and_the_version_that_sampled_them(
    served: Served,
) -> None:
    for temperature in (1.0, 0.7):
        answer = await served.generate(PROMPT, temperature=temperature, ignore_eos=True)
        ids = answer.choices[0].token_ids
        expected = reference_logprobs(served.models[0], PROMPT, ids, temperature=temperature)
        assert largest_difference(_stated(answer), expected) < NEAR
        assert _spans(answer) == [("0", 0, len(ids))]


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
    assert 0.0 in _stated(called)  # the tokens that had no alternative
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
        sampled, stated = answer.choices[0].token_ids, _stated(answer)
        (before, _, change), (after, start, end) = _spans(answer)
        assert (before, after, start, end) == (old, new, change, 300)
        assert largest_difference(stated[:change], served.truth(version - 1, ids, sampled[:change])) < NEAR
        assert largest_difference(stated[change:], served.truth(version, ids, sampled)[change:]) < NEAR
    again = await served.generate(PROMPT, ignore_eos=True)  # its prefix was cached under the old weights
    assert _spans(again) == [(new, 0, 16)]
    assert largest_difference(_stated(again), served.truth(version, PROMPT, again.choices[0].token_ids)) < NEAR


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
    assert largest_difference(_stated(answer), served.truth(2, PROMPT, answer.choices[0].token_ids)) < NEAR


def _group(leader: int) -> set[int]:
    """The living processes of a process group."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.add(int(stat.parent.name))
    return found
