"""`python -m openforge.sandbox_manager.api.document`: the OpenAPI document, as it is kept in docs/."""

import json
import sys
from pathlib import Path

from openforge.sandbox_manager.api.app import make_app

PLACE = Path("docs/sandbox-api.openapi.json")


def document() -> str:
    return json.dumps(make_app().openapi(), indent=1, sort_keys=True) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PLACE.read_text() == document() else f"{PLACE} is not what the code says: run it without --check")
    PLACE.write_text(document())


if __name__ == "__main__":
    main()
