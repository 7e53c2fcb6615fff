"""Where the model that a run file names lies on this machine."""

import os
from pathlib import Path

BUILTIN = "builtin:"


def models_home() -> Path:
    """`OPENFORGE_MODELS`, or `openforge/models` in the user's cache folder."""
    if stated := os.environ.get("OPENFORGE_MODELS"):
        return Path(stated).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "openforge" / "models"


def model_folder(model: str) -> Path:
    """The folder of `builtin:NAME` or of a path; raises `FileNotFoundError` where a built-in one was not made here."""
    if not model.startswith(BUILTIN):
        return Path(model)
    name = model.removeprefix(BUILTIN)
    folder = models_home() / name
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"model.path = {model!r} is not in {folder.parent}: run `openforge model get {name}` there"
        )
    return folder
