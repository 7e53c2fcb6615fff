import os
import shutil
from pathlib import Path

import pytest

from openforge.env.layout import BadTask, load_task, load_tasks

WORDS = """
names: {train: [fir, oak, elm, ash], heldout: [yew, box, fig, bay]}
"""

TASK = """
schema_version: 1
task_id: rename
instruction: Rename {{old}} to {{new}}, {{times}} times.
verifier: {command: [/bin/sh, /tests/check.sh, "{{new}}"]}
tags: [files]
variables:
  old: {words: names}
  new: {words: names}
  times: {between: [2, 9]}
  both: {text: "{{old}} and {{new}}"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    task = tmp_path / "rename"
    for part in ("environment/sub", "tests", "solution"):
        (task / part).mkdir(parents=True)
    (tmp_path / "words.yaml").write_text(WORDS)
    (task / "task.yaml").write_text(TASK)
    (task / "environment/{{old}}.txt").write_text("{{both}}\n")
    (task / "environment/sub/tool").write_bytes(b"\xff{{old}}")
    (task / "environment/sub/tool").chmod(0o700)
    (task / "tests/check.sh").write_text("test -e /workspace/{{new}}\n")
    (task / "solution/solve.sh").write_text("mv {{old}}.txt {{new}}\n")
    return tmp_path


def _edit(folder: Path, old: str, new: str) -> None:
    file = folder / "rename/task.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def _refusal(folder: Path) -> str:
    with pytest.raises(BadTask) as refused:
        load_tasks(folder)
    return str(refused.value)


def test_placeholders_are_filled_everywhere(folder: Path) -> None:
    (task,) = load_tasks(folder)
    drawn = task.draw(3, "train")
    old = drawn.instruction.split()[1]
    new = drawn.instruction.split()[3].rstrip(",")
    assert old != new
    assert drawn.workspace[f"{old}.txt"].content == f"{old} and {new}\n".encode()
    assert drawn.reference == f"mv {old}.txt {new}\n"
    assert drawn.verify == ("/bin/sh", "/tests/check.sh", new)
    assert drawn.tests["check.sh"].content == f"test -e /workspace/{new}\n".encode()


def test_binary_files_are_copied_and_executables_stay_executable(folder: Path) -> None:
    tool = load_tasks(folder)[0].draw(0, "train").workspace["sub/tool"]
    assert tool.content == b"\xff{{old}}"
    assert tool.mode == 0o755


def test_the_same_seed_gives_the_same_instance_wherever_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    here, there = load_tasks(folder)[0], load_tasks(tmp_path / "elsewhere")[0]
    assert here.draw(5, "train") == there.draw(5, "train")
    assert here.draw(5, "train").digest == there.draw(5, "train").digest
    assert here.draw(5, "train").digest != here.draw(6, "train").digest


def test_heldout_instances_use_words_that_training_never_sees(folder: Path) -> None:
    (task,) = load_tasks(folder)
    trained = {task.draw(seed, "train").instruction.split()[1] for seed in range(50)}
    heldout = {task.draw(seed, "heldout").instruction.split()[1] for seed in range(50)}
    assert trained == {"fir", "oak", "elm", "ash"}
    assert heldout == {"yew", "box", "fig", "bay"}


def test_a_template_draws_richer_variables(folder: Path) -> None:
    (folder / "rename/template.py").write_text(
        "def draw(rng, split):\n    return {'lines': '\\n'.join(rng.choice('ab') for _ in range(4))}\n"
    )
    (folder / "rename/environment/more.txt").write_text("{{lines}}")
    drawn = load_tasks(folder)[0].draw(1, "train")
    assert set(drawn.workspace["more.txt"].content) <= set(b"ab\n")
    assert drawn == load_tasks(folder)[0].draw(1, "train")


def test_a_template_must_return_texts_or_numbers(folder: Path) -> None:
    (folder / "rename/template.py").write_text("def draw(rng, split):\n    return {'lines': ['a']}\n")
    assert "template.py: draw returned lines = ['a']: use a text or a number" in _refusal(folder)


def test_a_template_must_not_draw_what_the_task_file_draws(folder: Path) -> None:
    (folder / "rename/template.py").write_text("def draw(rng, split):\n    return {'old': 'a'}\n")
    assert "'old' is a variable of task.yaml too" in _refusal(folder)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def draw(rng, split):\n    return 1 / 0\n", "draw breaks: ZeroDivisionError: division by zero (line 2 of "),
        ("def draw(rng): ...\n", "draw breaks: TypeError: draw() takes 1 positional argument but 2 were given"),
        ("this is no python", "cannot be loaded: SyntaxError: invalid syntax (template.py, line 1)"),
    ],
)
def test_a_template_that_breaks_names_its_line(folder: Path, code: str, said: str) -> None:
    (folder / "rename/template.py").write_text(code)
    refused = _refusal(folder)
    assert refused.startswith(str(folder / "rename/template.py"))
    assert said in refused


def test_raw_files_keep_their_braces(folder: Path) -> None:
    (folder / "rename/environment/page.html").write_text("{{ title }}")
    assert "page.html: {{ title }} names no variable" in _refusal(folder)
    _edit(folder, "tags:", "raw: [environment/*.html]\ntags:")
    assert load_tasks(folder)[0].draw(0, "train").workspace["page.html"].content == b"{{ title }}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema_version: 1", "schema_version: 2", "schema_version = 2: this version of OpenForge reads 1"),
        ("task_id: rename", "task_id: re name", "task_id = 're name': use 1 to 128 of"),
        ("instruction: Rename", "instrution: Rename", "unknown field `instrution`"),
        ("tags: [files]", "tags: [1]", "tags[0] = 1: expected `str`, got `int`"),
        ("{{old}} to", "{{odl}} to", "instruction: {{odl}} names no variable: there are both, new, old, times"),
        ("between: [2, 9]", "between: [9, 2]", "variables.times.between = [9, 2]: put the smaller number first"),
        ("old: {words: names}", "old: {words: nouns}", "words = 'nouns' is no word list: there are names"),
        ("old: {words: names}", "old: {words: names, count: 9}", "draw 10 words from 'names', which has 4"),
        ("times: {between: [2, 9]}", "times: {between: 2}", "variables.times.between = 2: expected `array"),
        ("old: {words: names}", "old: {}", "variables.old has none: give exactly one of"),
        ("verifier: {", "verifier: {timeout_s: 0, ", "verifier.timeout_s = 0.0: use more than 0"),
        ("verifier: {", "verifier: {artifacts: [/etc], ", "artifacts has '/etc': name /workspace or paths below"),
        ("verifier: {", "verifier: {artifacts: [/workspace/../etc], ", "name /workspace or paths below"),
        ("tags: [files]", "tags: [files", "is no YAML"),
    ],
)
def test_a_wrong_task_file_is_refused_in_one_sentence(folder: Path, old: str, new: str, message: str) -> None:
    _edit(folder, old, new)
    refusal = _refusal(folder)
    assert message in refusal
    assert refusal.startswith(str(folder / "rename/task.yaml"))


def test_word_lists_must_not_share_a_word(folder: Path) -> None:
    (folder / "words.yaml").write_text("names: {train: [fir, oak], heldout: [oak]}")
    assert "names: 'oak' is both in train and in heldout" in _refusal(folder)


def test_a_word_that_yaml_reads_as_something_else_is_named(folder: Path) -> None:
    (folder / "words.yaml").write_text("names: {train: [fir, no], heldout: [oak]}")
    assert "names.train[1] = False: expected `str`, got `bool`" in _refusal(folder)


def test_a_task_without_a_reference_is_refused(folder: Path) -> None:
    (folder / "rename/solution/solve.sh").unlink()
    assert "solve.sh is missing: write a script" in _refusal(folder)


def test_a_task_without_the_checks_that_it_names_is_refused(folder: Path) -> None:
    for file in (folder / "rename/tests").iterdir():
        file.unlink()
    assert "tests holds no file, and verifier.command = ['/bin/sh'" in _refusal(folder)


def test_symbolic_links_are_refused(folder: Path) -> None:
    os.symlink("/etc/passwd", folder / "rename/environment/link")
    assert "is a symbolic link: put a copy" in _refusal(folder)


def test_file_names_cannot_leave_their_folder(folder: Path) -> None:
    (folder / "rename/template.py").write_text("def draw(rng, split):\n    return {'up': '../../x'}\n")
    (folder / "rename/environment/{{up}}").write_text("")
    assert "its name becomes '../../x': use another" in _refusal(folder)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTask, match="holds no task"):
        load_tasks(tmp_path)
    with pytest.raises(BadTask, match=r"task\.yaml cannot be read: No such file"):
        load_task(tmp_path)


def test_tasks_share_checks_unless_they_have_their_own(folder: Path) -> None:
    for part, text in (("shared/tests", "shared {{old}}"), ("shared/environment", "for all")):
        (folder / part).mkdir(parents=True)
        (folder / part / "note").write_text(text)
    (folder / "shared/tests/check.sh").write_text("never seen")
    (task,) = load_tasks(folder)
    drawn = task.draw(3, "train")
    old = drawn.instruction.split()[1]
    assert drawn.tests["note"].content == f"shared {old}".encode()
    assert drawn.workspace["note"].content == b"for all"
    assert drawn.tests["check.sh"].content.startswith(b"test -e")


SERVICE = """
services:
  - {name: web, command: [/usr/bin/python3, /tmp/services/web.py, "{{old}}"], health: {port: 8900, path: /ready}}
"""


def test_services_are_drawn_like_everything_else(folder: Path) -> None:
    (before,) = load_tasks(folder)
    (folder / "rename/services").mkdir()
    (folder / "rename/services/web.py").write_text("print('{{new}}')\n")
    (folder / "rename/task.yaml").write_text(TASK + SERVICE)
    (task,) = load_tasks(folder)
    drawn = task.draw(3, "train")
    old, new = drawn.instruction.split()[1], drawn.instruction.split()[3].rstrip(",")
    assert drawn.services[0].command[-1] == old
    assert drawn.service_files["web.py"].content == f"print('{new}')\n".encode()
    assert drawn.digest != before.draw(3, "train").digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("port: 8900", "port: 99999", "services.web.health.port = 99999"),
        ("path: /ready", "path: ready", "services.web.health.path = 'ready'"),
        ("health: {port: 8900, path: /ready}", "health: {wait: 3}", "wait"),
        ("name: web", "name: a b", "'a b'"),
    ],
)
def test_a_wrong_service_is_named(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "rename/task.yaml").write_text(TASK + SERVICE)
    _edit(folder, old, new)
    assert message in _refusal(folder)
