import textwrap
from pathlib import Path

import pytest

from openforge.env.registry import (
    BadEnvironment,
    NoSuchEnvironment,
    NoSuchTask,
    draw,
    environments,
    load_environment,
    select,
)
from openforge.protos import TaskRef

ENV = """
from openforge.env.contract import TaskFile, TaskInstance, generator

HARNESSES = {"react": "direct"}


class Kind:
    def __init__(self, id):
        self.id = id

    def draw(self, seed, split):
        name = generator(self.id, seed, split).choice(["fir", "oak"])
        return TaskInstance(
            task=self.id, seed=seed, split=split, instruction=f"make {name}", workspace={}, tests={},
            reference=f"touch {name}", verify=("true",),
        )


def tasks():
    return [Kind("make"), Kind("break")]


def create_direct(sandbox, *, harness, **options):
    raise NotImplementedError
"""


def _write(folder: Path, text: str) -> str:
    (folder / "env.py").write_text(textwrap.dedent(text))
    return str(folder / "env.py")


def test_an_environment_is_loaded_from_its_file_or_its_folder(tmp_path: Path) -> None:
    path = _write(tmp_path, ENV)
    assert load_environment(path) is load_environment(str(tmp_path))


def test_a_name_that_is_not_installed_is_an_error_that_lists_what_is() -> None:
    with pytest.raises(NoSuchEnvironment, match="'nowhere' is not installed: use one of"):
        load_environment("nowhere")


def test_a_path_without_an_environment_names_the_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NoSuchEnvironment, match=r"there is no file .*env\.py"):
        load_environment(str(tmp_path))


def test_every_listed_environment_can_be_loaded() -> None:
    for name in environments():
        assert load_environment(name).HARNESSES


def test_a_harness_without_its_entry_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, ENV.replace('{"react": "direct"}', '{"mini": "pipeline"}'))
    with pytest.raises(BadEnvironment, match="lists harness 'mini' as pipeline but has no create_env"):
        load_environment(path)


def test_a_kind_of_harness_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, ENV.replace('{"react": "direct"}', '{"react": "indirect"}'))
    with pytest.raises(BadEnvironment, match="harness 'react' as 'indirect': use one of pipeline, command, direct"):
        load_environment(path)


def test_an_environment_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment, match="has no tasks"):
        load_environment(_write(tmp_path, "HARNESSES = {'react': 'direct'}"))


def test_tasks_are_selected_by_id_and_all_of_them_without_one(tmp_path: Path) -> None:
    module = load_environment(_write(tmp_path, ENV))
    assert [template.id for template in select(module, [])] == ["make", "break"]
    assert [template.id for template in select(module, ["break"])] == ["break"]
    with pytest.raises(NoSuchTask, match=r"'mend' is not in this environment: it has break, make"):
        select(module, ["mend"])


def test_drawing_a_reference_twice_gives_the_same_instance(tmp_path: Path) -> None:
    module = load_environment(_write(tmp_path, ENV))
    ref = TaskRef(env="x", task="make", seed=7)
    assert draw(module, ref) is draw(module, TaskRef(env="x", task="make", seed=7))
    assert draw(module, ref).instruction in ("make fir", "make oak")
