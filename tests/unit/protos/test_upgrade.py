"""Two versions side by side: each reads what the other writes, whichever of them is newer.

The newer version is made here from the one that is: every fact, and everything within it, has gained a field.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fact_examples import FACTS

from openforge.protos import AnyFact, EndReason, EpisodeEnded, Fact

GOLDEN = Path(__file__).parent / "golden"
LATER = {"deep": [1, 2]}

_ours = msgspec.msgpack.Decoder(AnyFact)


def name_of(fact: Fact) -> str:
    return type(fact).__name__


def newer(fact: type[Fact]) -> type[msgspec.Struct]:
    """The same fact as a version with one more field defines it."""
    fields: list[tuple[Any, ...]] = []
    for field in msgspec.structs.fields(fact):
        default = () if field.default is msgspec.NODEFAULT else (field.default,)
        if field.default_factory is not msgspec.NODEFAULT:
            default = (msgspec.field(default_factory=field.default_factory),)
        fields.append((field.name, field.type, *default))
    fields.append(("invented_later", dict[str, list[int]], msgspec.field(default_factory=lambda: {"none": [0]})))
    return msgspec.defstruct(fact.__name__, fields, tag=fact.__name__, tag_field="fact", kw_only=True, frozen=True)


def grown(value: Any) -> Any:
    """What a version writes in which every Struct, down to the spans, has gained a field."""
    match value:
        case msgspec.Struct():
            config = value.__struct_config__
            inner = {field.encode_name: grown(getattr(value, field.name)) for field in msgspec.structs.fields(value)}
            if config.array_like:
                return [*inner.values(), LATER]
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            return tag | inner | {"invented_later": LATER}
        case list() | tuple():
            return [grown(item) for item in value]
        case dict():
            return {key: grown(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_the_newer_version_reads_what_the_older_wrote(fact: Fact) -> None:
    for file in GOLDEN.glob(f"{name_of(fact)}.*.hex"):
        read = msgspec.msgpack.decode(bytes.fromhex(file.read_text()), type=newer(type(fact)))
        written = _ours.decode(bytes.fromhex(file.read_text()))
        assert all(getattr(read, name) == getattr(written, name) for name in fact.__struct_fields__)
        assert read.invented_later == {"none": [0]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_the_older_version_reads_what_the_newer_writes(fact: Fact) -> None:
    theirs = newer(type(fact))(**msgspec.structs.asdict(fact), invented_later=LATER)
    assert b"invented_later" in msgspec.msgpack.encode(theirs)
    assert _ours.decode(msgspec.msgpack.encode(theirs)) == fact


@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_the_older_version_reads_facts_that_grew_everywhere_within(fact: Fact) -> None:
    assert _ours.decode(msgspec.msgpack.encode(grown(fact))) == fact


def test_a_reason_that_only_the_newer_version_knows_is_not_taken_for_another() -> None:
    ended = next(fact for fact in FACTS if isinstance(fact, EpisodeEnded))
    theirs = msgspec.msgpack.decode(ended.encode()) | {"reason": "invented_later"}
    assert "invented_later" not in {str(reason) for reason in EndReason}
    with pytest.raises(msgspec.ValidationError, match="invented_later"):
        _ours.decode(msgspec.msgpack.encode(theirs))
