"""The bytes of every fact, as they were written and as they must be readable for ever.

`golden/<name>.<n>.hex` holds what some version wrote. When a fact gains a field, add the file of the next
`n`; those before it stay and must still decode. To make the first file of a new fact, run this module.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fact_examples import ATTEMPT_KEY, DEAD_LETTER, FACTS

from openforge.protos import AnyFact, AttemptKey, DeadLetter, Fact
from openforge.protos.schema import facts

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES: tuple[Any, ...] = (*FACTS, DEAD_LETTER, ATTEMPT_KEY)

_union = msgspec.msgpack.Decoder(AnyFact)


def name_of(example: Any) -> str:
    return type(example).__name__


def golden_files(name: str) -> list[Path]:
    return sorted(GOLDEN.glob(f"{name}.*.hex"), key=lambda path: int(path.suffixes[-2][1:]))


def read(path: Path) -> bytes:
    return bytes.fromhex(path.read_text())


def decode(example: Any, data: bytes) -> Any:
    return _union.decode(data) if isinstance(example, Fact) else msgspec.msgpack.decode(data, type=type(example))


def test_every_fact_has_an_example() -> None:
    assert {type(fact) for fact in FACTS} == set(facts())


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_a_fact_is_written_as_it_always_was(example: Any) -> None:
    assert msgspec.msgpack.encode(example) == read(golden_files(name_of(example))[-1])


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_what_any_version_wrote_is_read(example: Any) -> None:
    decoded = [decode(example, read(path)) for path in golden_files(name_of(example))]
    assert decoded[-1] == example
    if isinstance(example, Fact):
        assert {fact.subject() for fact in decoded} == {example.subject()}


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_a_field_that_only_a_newer_version_knows_is_passed_over(example: Any) -> None:
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(example)) | {"invented_later": {"deep": [1, 2]}}
    assert decode(example, msgspec.msgpack.encode(newer)) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_fields_that_an_older_version_did_not_know_get_their_defaults(example: Any) -> None:
    required = {field.encode_name for field in msgspec.structs.fields(example) if field.required}
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(example))
    older = {name: value for name, value in written.items() if name in required or name == "fact"}
    decoded = decode(example, msgspec.msgpack.encode(older))
    for field in msgspec.structs.fields(decoded):
        if not field.required and field.default is not msgspec.NODEFAULT:
            assert getattr(decoded, field.name) == field.default


def test_a_dead_letter_and_a_key_are_no_facts() -> None:
    for example in (DEAD_LETTER, ATTEMPT_KEY):
        assert isinstance(example, DeadLetter | AttemptKey)
        with pytest.raises(msgspec.ValidationError):
            _union.decode(msgspec.msgpack.encode(example))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for example in EXAMPLES:
        if not golden_files(name_of(example)):
            text = msgspec.msgpack.encode(example).hex()
            lines = [text[at : at + 96] for at in range(0, len(text), 96)]
            (GOLDEN / f"{name_of(example)}.1.hex").write_text("\n".join(lines) + "\n")
