"""The documents of the wire say what the code does."""

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from fact_examples import ATTEMPT_KEY, DEAD_LETTER, FACTS

from openforge.protos import Fact
from openforge.protos.schema import address, asyncapi, json_schema, main, stale, write

DOCUMENTS = Path(__file__).parents[3] / "docs" / "protos"


def test_the_documents_are_those_of_the_code() -> None:
    assert stale(DOCUMENTS) == []


def test_check_names_the_document_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--out", str(tmp_path)]) == 1
    write(tmp_path)
    assert main(["--check", "--out", str(tmp_path)]) == 0
    (tmp_path / "asyncapi.json").write_text("{}")
    assert main(["--check", "--out", str(tmp_path)]) == 1
    assert "asyncapi.json differ" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("example", [*FACTS, DEAD_LETTER, ATTEMPT_KEY], ids=lambda example: type(example).__name__)
def test_every_example_fits_its_schema(example: Any) -> None:
    schema = json_schema()
    instance = msgspec.json.decode(msgspec.json.encode(example))
    name = type(example).__name__
    jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schema["$defs"]}).validate(instance)
    if isinstance(example, Fact):
        jsonschema.Draft202012Validator(schema).validate(instance)


def test_every_reference_of_the_documents_leads_somewhere() -> None:
    for document in (json_schema(), asyncapi()):
        for reference in references(document):
            place: Any = document
            for part in reference.removeprefix("#/").split("/"):
                place = place[part]
            assert place


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        here = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return here + [found for value in node.values() for found in references(value)]
    if isinstance(node, list):
        return [found for value in node for found in references(value)]
    return []


def test_a_channel_has_the_subject_of_its_fact_with_the_key_as_parameters() -> None:
    channels = asyncapi()["channels"]
    for fact in FACTS:
        channel = channels[type(fact).__name__]
        assert channel["address"] == address(type(fact))
        filled = channel["address"].replace("{run}", fact.run)
        for name, value in zip(list(channel["parameters"])[1:], fact.key(), strict=True):
            filled = filled.replace(f"{{{name}}}", str(value))
        assert filled == fact.subject()
