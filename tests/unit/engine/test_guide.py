"""A guided answer matches what it was asked to match, whatever the model prefers."""

import json
from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer, byte_tokenizer_folder

from openforge.chat.chatml import ChatMLHermes
from openforge.chat.contract import CUSTOM_PARAMETERS, Tool, ToolChoice
from openforge.engine.guide import BadGuide, Guides
from openforge.engine.sampler import Draw, sample
from openforge.wire.generate import StructuredOutputs

END = 2
VOCABULARY = 320  # more than the tokenizer has, as models do
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(
        name="first",
        parameters={"properties": {"k": {"enum": ["é", '"']}}, "required": ["k"], "additionalProperties": False},
    ),
    Tool(name="patch", parameters=CUSTOM_PARAMETERS, kind="custom"),
]


@pytest.fixture(scope="module")
def guides(tmp_path_factory: pytest.TempPathFactory) -> Guides:
    return Guides(byte_tokenizer_folder(tmp_path_factory.mktemp("model")) / "tokenizer.json", VOCABULARY)


def drawn(guides: Guides, wanted: StructuredOutputs, seed: int) -> tuple[list[int], list[float]]:
    """An answer from random logits that lean to what ends strings and objects."""
    guide = guides.make(wanted, END)
    luck = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    logprobs: list[float] = []
    ends = byte_tokenizer().encode('"}', add_special_tokens=False).ids
    while len(ids) < 300 and (not ids or ids[-1] != END):
        logits = torch.randn(1, VOCABULARY, generator=luck)
        logits[0, ends] += 5.0
        uniform = float(torch.rand((), generator=luck))
        draw = Draw(temperature=1.0, top_k=0, top_p=1.0, uniform=uniform, allowed=guide.allowed())
        [token], [logprob] = sample(logits, [draw])
        guide.take(token)
        ids.append(token)
        logprobs.append(logprob)
    return ids, logprobs


def test_an_answer_matches_its_schema_and_tokens_without_alternative_have_logprob_0(guides: Guides) -> None:
    for seed in range(5):
        ids, logprobs = drawn(guides, StructuredOutputs(json=json.dumps(SCHEMA)), seed)
        value = json.loads(byte_tokenizer().decode(ids))
        assert set(value) == {"a", "n"}
        assert value["a"] in ("x", "y")
        assert value["n"] <= 99
        assert logprobs[0] == 0.0  # nothing but a brace can come first
        assert min(logprobs) < 0.0


@pytest.mark.parametrize("parallel", [False, True])
def test_a_forced_call_is_a_call_of_the_tools_that_may_be_called(guides: Guides, parallel: bool) -> None:
    renderer = ChatMLHermes(byte_tokenizer())
    for choice, names in ((ToolChoice("required"), {"first", "patch"}), (ToolChoice("named", ("first",)), {"first"})):
        guide = renderer.guide(TOOLS, choice, parallel=parallel, schema=b"")
        assert guide is not None
        for seed in range(3):
            ids, _ = drawn(guides, StructuredOutputs(grammar=guide.grammar), seed)
            if ids[-1] != END:
                continue
            parsed = renderer.parse(ids, TOOLS)
            assert parsed.broken == ()
            assert parsed.content == ""
            assert {call.name for call in parsed.tool_calls} <= names
            assert len(parsed.tool_calls) == 1 or (parallel and parsed.tool_calls)


def test_a_schema_beside_tools_leaves_the_choice_to_the_model() -> None:
    renderer = ChatMLHermes(byte_tokenizer())
    schema = json.dumps(SCHEMA).encode()
    both = renderer.guide(TOOLS, ToolChoice(), parallel=True, schema=schema)
    assert both is not None
    assert both.grammar.startswith('start: call ("\\n" call)* | answer\n')
    alone = renderer.guide(TOOLS, ToolChoice("none"), parallel=True, schema=schema)
    assert alone is not None
    assert alone.schema == schema.decode()
    assert renderer.guide(TOOLS, ToolChoice(), parallel=True, schema=b"") is None
    assert renderer.guide((), ToolChoice("required"), parallel=True, schema=b"") is None


def test_keywords_that_nobody_knows_are_left_out(guides: Guides) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string"}}, "unevaluatedProperties": False, "x-vendor": 1}
    tool = Tool(name="f", parameters=odd)
    both = ChatMLHermes(byte_tokenizer()).guide([tool], ToolChoice(), parallel=True, schema=json.dumps(odd).encode())
    assert both is not None
    guides.make(StructuredOutputs(grammar=both.grammar), END)
    guides.make(StructuredOutputs(json=json.dumps(odd)), END)


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputs(),
        StructuredOutputs(json="{}", grammar="start: /x/"),
        StructuredOutputs(json='{"type": 3}'),
        StructuredOutputs(json="no json"),
        StructuredOutputs(grammar="start: nowhere"),
    ],
)
def test_what_cannot_be_a_guide_is_refused(guides: Guides, wanted: StructuredOutputs) -> None:
    with pytest.raises(BadGuide):
        guides.make(wanted, END)


def test_a_tokenizer_that_is_no_file_is_not_read_before_it_is_needed(tmp_path: Path) -> None:
    Guides(tmp_path / "nowhere.json", VOCABULARY)


@pytest.mark.parametrize("parallel", [False, True])
def test_where_some_tools_are_allowed_an_answer_is_text_or_calls_of_those(guides: Guides, parallel: bool) -> None:
    renderer = ChatMLHermes(byte_tokenizer())
    guide = renderer.guide(TOOLS, ToolChoice("auto", ("first",)), parallel=parallel, schema=b"")
    assert guide is not None
    call = '<tool_call>\n{"name": "%s", "arguments": {"k":"é"}}\n</tool_call>'
    for text, matches in (
        ("", True),
        ("Just text with a < and a <tool in it.", True),
        ("<think>\nHm.\n</think>\n\nDoing.\n" + call % "first", True),
        (call % "first", True),
        (call % "first" + "\n" + call % "first", parallel),
        ("Doing.\n" + call % "patch", False),
        ("<tool_call>", False),
    ):
        assert follows(guides, guide.grammar, text) is matches, text
    assert renderer.guide(TOOLS, ToolChoice("auto", ("first", "patch")), parallel=parallel, schema=b"") is None


def follows(guides: Guides, grammar: str, text: str) -> bool:
    """Whether an answer of this text, and nothing more, matches."""
    guide = guides.make(StructuredOutputs(grammar=grammar), END)
    for token in byte_tokenizer().encode(text, add_special_tokens=False).ids:
        if not guide.allowed()[token]:
            return False
        guide.take(token)
    return bool(guide.allowed()[END])
