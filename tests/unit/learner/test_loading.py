from pathlib import Path

import pytest
from learner_world import tiny_model

from openforge.learner.backends.contract import BackendRefused
from openforge.learner.backends.loading import load_plain


def test_weights_that_are_cut_short_are_told_with_the_name_of_their_model(tmp_path: Path) -> None:
    folder = Path(tiny_model(tmp_path))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BackendRefused, match=f"model {folder}: its weights cannot be read"):
        load_plain(str(folder))
