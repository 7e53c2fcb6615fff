"""`docs/run-file.md`, written from the code: `python -m openforge.cli.run_file_docs`."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from openforge.runs import RunConfig

PAGE = Path("docs/run-file.md")
HEAD = """# The run file

One TOML file says what a run does; the environment says where it runs (see [architecture.md](architecture.md)).
`openforge train RUN.toml --dry-run` checks it and prints what would happen; a mistake is answered with the field, the
value and the way out. `--set section.field=value` overrides one field. Examples are in [`examples/`](../examples). This
page is generated from `libs/openforge/runs/config.py`.
"""


def page() -> str:
    return HEAD + "".join(
        part for field in msgspec.structs.fields(RunConfig) for part in _section(field.name, field.type)
    )


def _section(name: str, section: type[msgspec.Struct]) -> Iterator[str]:
    yield f"\n## `[{name}]`\n"
    if section.__doc__ and "frozen" not in section.__doc__:
        yield f"{inspect.cleandoc(section.__doc__)}\n"
    yield "\n| field | type | default |\n|---|---|---|\n"
    tables: list[tuple[str, type[msgspec.Struct]]] = []
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            tables.append((f"{name}.{field.name}", field.type))
        else:
            yield f"| `{field.name}` | {_type(field.type)} | {_default(field)} |\n"
    for table, kind in tables:
        yield from _section(table, kind)


def _type(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    text = re.sub(r"typing\.Literal\[(.*?)\]", lambda match: match.group(1).replace(", ", " or "), text)
    return text.replace("|", "or").replace("typing.", "")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{msgspec.json.encode(value).decode()}`"


if __name__ == "__main__":
    PAGE.write_text(page())
