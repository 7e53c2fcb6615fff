"""What the bus carries, for people and tools that do not read Python: JSON Schema and AsyncAPI.

Promises: both are made from the Structs alone, so they cannot say anything else than the code;
`--check` exits 1 where the files differ from it.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from openforge.protos import KEY_BUCKET, SCHEMA_VERSION, AnyFact, AttemptKey, DeadLetter, Fact

SCHEMA_FILE = "facts.schema.json"
ASYNCAPI_FILE = "asyncapi.json"
DEFAULT_FOLDER = "docs/protos"
_ENCODING = (
    "MessagePack maps, one for each message; what the schema shows as base64 text is binary there. "
    "Packed arrays are little-endian int32 (ids) and float32 (log-probs). A header `Of-Encoding: zstd` means that the "
    "payload is compressed, `Of-Blob` that it lies in the object store `of_blobs` under that sha256."
)


class _Name(str):
    """Stands for a fact whose every field is the field's own name, so that `key` tells what it is made of."""

    def __getattr__(self, name: str) -> "_Name":
        return _Name(name)


def facts() -> list[type[Fact]]:
    return sorted(get_args(AnyFact), key=lambda fact: fact.__name__)


def key_names(fact: type[Fact]) -> tuple[str, ...]:
    """The fields of the natural key, in the order of the subject."""
    key = cast("Callable[[str], tuple[str, ...]]", fact.key)
    return tuple(str(name) for name in key(_Name("")))


def address(fact: type[Fact]) -> str:
    """The subject with its parameters in braces."""
    parts = ["of", "{run}", fact.kind, fact.name, *(f"{{{name}}}" for name in key_names(fact))]
    return ".".join(part for part in parts if part)


def json_schema() -> dict[str, Any]:
    _, definitions = _components("#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "OpenForge facts",
        "description": f"Schema version {SCHEMA_VERSION}. {_ENCODING}",
        "oneOf": [{"$ref": f"#/$defs/{fact.__name__}"} for fact in facts()],
        "$defs": definitions,
    }


def asyncapi() -> dict[str, Any]:
    _, definitions = _components("#/components/schemas/{name}")
    kinds: list[type[Any]] = [*facts(), DeadLetter]
    channels = {fact.__name__: _channel(fact) for fact in facts()}
    channels["DeadLetter"] = {
        "address": "of.dead.{service}",
        "description": _doc(DeadLetter),
        "parameters": _parameters(("service",)),
        "messages": {"DeadLetter": {"$ref": "#/components/messages/DeadLetter"}},
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "OpenForge",
            "version": str(SCHEMA_VERSION),
            "description": "Facts over NATS JetStream, each told once: a subject ends in its fact's natural key. "
            + _ENCODING,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/msgpack",
        "channels": channels,
        "operations": {
            f"follow{name}": {"action": "receive", "channel": {"$ref": f"#/channels/{name}"}} for name in channels
        },
        "components": {
            "messages": {kind.__name__: _message(kind) for kind in kinds},
            "schemas": definitions,
        },
    }


def _components(ref_template: str) -> tuple[Any, dict[str, Any]]:
    schemas, definitions = msgspec.json.schema_components((*facts(), DeadLetter, AttemptKey), ref_template=ref_template)
    definitions["AttemptKey"]["description"] = f"{_doc(AttemptKey)} Entry of the key-value bucket {KEY_BUCKET}."
    return schemas, dict(sorted(definitions.items()))


def _channel(fact: type[Fact]) -> dict[str, Any]:
    return {
        "address": address(fact),
        "title": f"stream {fact.kind.upper()}",
        "description": _doc(fact),
        "parameters": _parameters(("run", *key_names(fact))),
        "messages": {fact.__name__: {"$ref": f"#/components/messages/{fact.__name__}"}},
    }


def _parameters(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"description": f"`{name}` of the message: 1 to 128 of A-Z a-z 0-9 _ -"} for name in names}


def _message(kind: type[Any]) -> dict[str, Any]:
    return {
        "name": kind.__name__,
        "summary": _doc(kind).partition(". ")[0].rstrip(".") + ".",
        "contentType": "application/msgpack",
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }


def _doc(kind: type[Any]) -> str:
    return " ".join((kind.__doc__ or "").split())


def documents() -> dict[str, bytes]:
    """File name to content."""
    return {
        name: msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
        for name, document in ((SCHEMA_FILE, json_schema()), (ASYNCAPI_FILE, asyncapi()))
    }


def stale(folder: Path) -> list[Path]:
    """The files that differ from the code."""
    return [
        folder / name
        for name, content in documents().items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content
    ]


def write(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in documents().items():
        (folder / name).write_bytes(content)
    return [folder / name for name in documents()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="openforge protos schema", description=__doc__)
    parser.add_argument("--out", default=DEFAULT_FOLDER, help=f"folder of the documents (default {DEFAULT_FOLDER})")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where they differ from the code")
    options = parser.parse_args(arguments)
    folder = Path(options.out)
    if not options.check:
        print(*write(folder), sep="\n")
        return 0
    if differing := stale(folder):
        names = ", ".join(map(str, differing))
        print(f"{names} differ from the code: run `openforge protos schema`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
