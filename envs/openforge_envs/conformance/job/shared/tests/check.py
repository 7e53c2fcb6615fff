"""Prints reward 1 where notes.txt holds the three lines, each once."""

import json
from pathlib import Path

WANTED = ["größe ✓ 1", "two", "three"]


def main() -> None:
    notes = Path("/workspace/notes.txt")
    lines = notes.read_text(encoding="utf-8", errors="replace").splitlines() if notes.is_file() else []
    print(json.dumps({"reward": float(lines == WANTED)}))


if __name__ == "__main__":
    main()
