"""Run files: accepted whole, or refused with every reason at once."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from openforge.protos import RunPaused, RunStopped, RunSubmitted, StopReason
from openforge.runs import BadRunFile, canonical, config_of, differing, load_run_file, run_state

ENVIRONMENT = """
HARNESSES = {"words": "direct", "mini": "command"}

class Template:
    def __init__(self, id):
        self.id = id

def tasks():
    return [Template("touch"), Template("rename")]

def create_command(**_):
    raise NotImplementedError

create_direct = create_command
"""

GOOD = """
[run]
name = "r1"
steps = 4
[model]
path = "models/tiny"
[environment]
name = "./env.py"
harness = "words"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(GOOD)
    return tmp_path


def problems(folder: Path, text: str = "", *overrides: str) -> str:
    (folder / "run.toml").write_text(text or GOOD)
    with pytest.raises(BadRunFile) as refused:
        load_run_file(folder / "run.toml", overrides)
    return "\n".join(refused.value.problems)


def test_a_good_file_becomes_a_config_with_absolute_paths(folder: Path) -> None:
    config = load_run_file(folder / "run.toml")
    assert config.model.path == str(folder / "models/tiny")
    assert config.environment.name == str(folder / "env.py")
    assert config.run.steps == 4


def test_a_builtin_model_is_no_path(folder: Path) -> None:
    config = load_run_file(folder / "run.toml", ["model.path=builtin:tiny"])
    assert config.model.path == "builtin:tiny"


def test_overrides_win_and_need_no_quotes(folder: Path) -> None:
    config = load_run_file(
        folder / "run.toml", ["run.steps=9", "run.name=other", "environment.limits.turns=3", "sampling.stop=['x']"]
    )
    assert (config.run.steps, config.run.name, config.environment.limits.turns) == (9, "other", 3)
    assert config.sampling.stop == ("x",)


def test_all_problems_are_told_at_once(folder: Path) -> None:
    text = GOOD + '[pacing]\ngroup_sise = 8\nmax_lag = "two"\nstaleness = "dorp"\n[lerner]\nthreads = 1\n'
    told = problems(folder, text)
    assert "pacing.group_sise = 8: there is no such field; did you mean group_size?" in told
    assert 'pacing.max_lag = "two" is not a whole number' in told
    assert 'pacing.staleness = "dorp" is none of "drop", "wait", "mask"; did you mean "drop"?' in told
    assert "there is no such section; did you mean learner?" in told


def test_values_that_are_out_of_range_are_told_beside_those_of_the_wrong_type(folder: Path) -> None:
    told = problems(folder, GOOD + '[pacing]\ngroup_size = 1\nin_flight = "many"\n[sampling]\ntop_p = 2\n')
    assert told.splitlines() == [
        'pacing.in_flight = "many" is not a whole number: write for example 1',
        "pacing.group_size = 1 is too small: write 2 or more (one reward has nothing to be compared with, "
        "so it teaches nothing; 8 is usual)",
        "sampling.top_p = 2.0 is too large: write 1 or less (1.0 means no such limit)",
    ]


def test_missing_fields_say_where_to_write_them(folder: Path) -> None:
    told = problems(folder, '[run]\nname = "r"\n[environment]\nname = "./env.py"\nharness = "words"\n')
    assert "run.steps is missing: write steps = 1 under [run]" in told
    assert 'model.path = "" is empty: name one' in told
    told = problems(folder, '[run]\nname = "r"\nsteps = 1\n')
    assert "[environment] is missing: add the section with name, harness" in told


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("pacing.group_size=1", "pacing.group_size = 1 is too small: write 2 or more"),
        ("pacing.max_lag=-1", "pacing.max_lag = -1 is too small: write 0 or more"),
        ("sampling.temperature=0", "sampling.temperature = 0.0 must be above 0"),
        ("pacing.in_flight=4", "pacing.in_flight = 4 is less than pacing.group_size = 8"),
        (
            'engine.weight_path="nccl"',
            'engine.weight_path = "nccl" with engine.kind = "embedded", which is no vLLM',
        ),
        ("pacing.in_flight_least=4", "pacing.in_flight_least = 4 is less than pacing.group_size = 8"),
        ("pacing.in_flight_least=65", "pacing.in_flight_least = 65 is more than pacing.in_flight = 64"),
        ("sampling.top_p=1.5", "sampling.top_p = 1.5 is too large: write 1 or less"),
        ("learner.betas=[0.9, 1.0]", "learner.betas = [0.9, 1.0]: each must be from 0 to below 1"),
        ("run.name=a b", "run.name = 'a b' cannot be part of a subject"),
        ("sampling.max_tokens=2048", "leaves no room for a prompt"),
        ("run.steps=0", "the run would do nothing"),
        ("environment.harness=word", 'environment.harness = "word" is not in this environment: did you mean "words"?'),
        ("environment.tasks=['tuch']", 'environment.tasks = "tuch" is not in this environment: did you mean "touch"?'),
        ("environment.name=nowhere", "environment.name = 'nowhere' is not installed: use one of "),
        ("environment.limits.cpus=1e-7", "environment.limits.cpus = 1e-07 is too small: write 0.01 or more"),
        ("environment.limits.memory_mb=1", "environment.limits.memory_mb = 1 is too small: write 16 or more"),
        ("run=3", "--set run=3: write section.field=value"),
        ("run.steps.deep=3", "--set run.steps.deep=3: steps is a value, not a section"),
        ("run.steps=nan", "run.steps = nan is not a whole number"),
        ("sampling.temperature=nan", "sampling.temperature = nan must be above 0"),
        ('sampling.stop=[""]', 'sampling.stop has "", which every answer ends with before it begins: leave it out'),
        ("environment.options={a=[1]}", "environment.options.a = [1] is not a text or a whole number or"),
        (f"run.steps={'9' * 5000}", "is not a whole number: write for example 1"),
        (f"run.steps=0x{'f' * 5000}", "run.steps = a number of thousands of digits is no number that a run can use"),
        (f"run.steps={'[' * 20_000}", "is not a whole number: write for example 1"),
        ("model.path=\udcff", 'model.path = "\udcff" holds a character that no file or message can'),
        (r'environment.name="a\u0000.py"', r'environment.name = "a\u0000.py" holds a character that no file'),
        (r'sampling.stop=["\u0000"]', "holds a character that no file or message can: write plain text"),
        (f"environment.name={'a' * 300}.py", "cannot be loaded: OSError: [Errno 36] File name too long"),
    ],
)
def test_a_bad_value_is_refused_with_the_way_out(folder: Path, override: str, sentence: str) -> None:
    assert sentence in problems(folder, "", override)


def test_adapters_are_not_broadcast(folder: Path) -> None:
    asked = ("engine.kind=vllm", 'engine.weight_path="gloo"', "learner.lora.rank=8")
    assert 'engine.weight_path = "gloo" with engine.lora = "adapters"' in problems(folder, "", *asked)
    assert load_run_file(folder / "run.toml", [*asked, 'engine.lora="merged"']).engine.weight_path == "gloo"


def test_text_that_is_no_toml_names_the_line(folder: Path) -> None:
    assert "line 3" in problems(folder, "[run]\nname = 'r'\nsteps = = 3\n")


def test_a_file_that_is_not_there_or_not_text_is_said_so(folder: Path) -> None:
    with pytest.raises(BadRunFile, match="there is no such file"):
        load_run_file(folder / "none.toml")
    (folder / "latin.toml").write_bytes(b"[run]\nname = '\xe9'\n")
    with pytest.raises(BadRunFile, match="byte 14 is not UTF-8"):
        load_run_file(folder / "latin.toml")
    for unreadable in (folder, folder / ("a" * 300), folder / "latin.toml" / "run.toml"):
        with pytest.raises(BadRunFile, match="cannot be read"):
            load_run_file(unreadable)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 20_000])
def test_what_no_reader_can_follow_is_said_so(folder: Path, value: str) -> None:
    assert "a number or a nesting that nobody can read" in problems(folder, f"{GOOD}\n[more]\na = {value}\n")


def test_a_file_as_some_editors_save_it_is_read(folder: Path) -> None:
    (folder / "run.toml").write_bytes(b"\xef\xbb\xbf" + (folder / "run.toml").read_bytes())
    assert load_run_file(folder / "run.toml").run.steps


def test_a_section_written_as_a_value_is_said_so(folder: Path) -> None:
    assert "pacing is a section" in problems(folder, "pacing = 3\n" + GOOD)


def test_canonical_json_round_trips_and_its_digest_ignores_order(folder: Path) -> None:
    config = load_run_file(folder / "run.toml")
    text, digest = canonical(config)
    assert config_of(text) == config
    (folder / "run.toml").write_text(
        "[model]\npath = 'models/tiny'\n" + GOOD.replace('[model]\npath = "models/tiny"', "")
    )
    assert canonical(load_run_file(folder / "run.toml"))[1] == digest


def test_differences_are_named_with_both_values(folder: Path) -> None:
    one = load_run_file(folder / "run.toml")
    other = load_run_file(folder / "run.toml", ["pacing.max_lag=3", "environment.options.image='x'"])
    assert differing(one, other) == [
        'environment.options.image: "absent" -> "x"',
        "pacing.max_lag: 1 -> 3",
    ]


def test_a_config_of_a_newer_release_is_refused_by_field() -> None:
    with pytest.raises(BadRunFile, match=r"run\.colour = \"red\": there is no such field"):
        config_of(msgspec.json.encode({"run": {"name": "r", "steps": 1, "colour": "red"}}).decode())


def submitted(generation: int) -> RunSubmitted:
    return RunSubmitted(run="r", generation=generation, config="{}", config_digest="d")


def test_a_run_is_what_its_newest_generation_says() -> None:
    stopped = RunStopped(run="r", generation=0, reason=StopReason.INTERRUPTED)
    paused = RunPaused(run="r", generation=1)
    assert run_state([]).phase == "absent"
    assert run_state([submitted(0)]).phase == "submitted"
    assert run_state([submitted(0), stopped]).phase == "stopped"
    assert run_state([submitted(0), stopped, submitted(1)]).phase == "submitted"
    assert run_state([submitted(0), submitted(1), stopped]).phase == "submitted"
    assert run_state([submitted(0), submitted(1), paused]).phase == "paused"
    assert run_state([submitted(0), submitted(1), paused, submitted(2)]).generation == 2


def test_a_sandbox_too_small_for_its_own_files_is_refused_with_the_least_that_will_do(tmp_path: Path) -> None:
    source = (Path(__file__).parents[3] / "examples" / "tiny.toml").read_text()
    file = tmp_path / "small.toml"
    file.write_text(source)
    with pytest.raises(BadRunFile, match=r"memory_mb = 100 is too little for disk_mb = 64.*write 160 or more"):
        load_run_file(file, ["environment.limits.memory_mb=100", "environment.limits.disk_mb=64"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sampling.temperature", "inf"),
        ("learner.learning_rate", "inf"),
        ("pacing.in_flight", "99999999999999999999999"),
        ("evaluation.heldout_episodes", "99999999999"),
        ("learner.betas", "[0.9, inf]"),
        ("environment.options.ratio", "inf"),
    ],
)
def test_a_number_that_no_run_could_use_is_refused_with_the_most_that_one_can(
    folder: Path, field: str, value: str
) -> None:
    with pytest.raises(
        BadRunFile, match=rf"{field} = .* is no number that a run can use: write \d+ or less"
    ) as refused:
        load_run_file(folder / "run.toml", [f"{field}={value}"])
    assert len(refused.value.problems) == 1


def test_the_largest_seed_is_as_good_as_any(folder: Path) -> None:
    assert load_run_file(folder / "run.toml", [f"run.seed={2**31 - 1}"]).run.seed == 2**31 - 1


def test_a_limit_is_told_in_full_digits(folder: Path) -> None:
    with pytest.raises(BadRunFile, match=r"run\.steps = 1000001 is too large: write 1000000 or less"):
        load_run_file(folder / "run.toml", ["run.steps=1000001"])


ENDPOINT = '[engine]\nkind = "endpoint"\nurl = "http://127.0.0.1:1/v1"\nmodel = "m"\n'
BEYOND_ENDPOINTS = "[sampling]\ntop_k = 5\n[pacing]\nin_flight_least = 8\n"


def test_a_run_against_an_endpoint_needs_no_model_and_trains_nothing(folder: Path) -> None:
    head = '[run]\nname = "r"\nsteps = 0\n[evaluation]\nheldout_episodes = 1\n'
    rest = '[environment]\nname = "./env.py"\nharness = "words"\n'
    file = folder / "endpoint.toml"
    file.write_text(head + rest + ENDPOINT)
    assert load_run_file(file).model.path == ""
    told = problems(folder, head.replace("steps = 0", "steps = 3") + rest + ENDPOINT + BEYOND_ENDPOINTS)
    assert 'run.steps = 3 with engine.kind = "endpoint": nobody knows the tokens of its answers' in told
    assert "sampling.top_k = 5: endpoints know no such limit; write 0" in told
    assert 'pacing.in_flight_least = 8 with engine.kind = "endpoint": nobody measures it; write 0' in told
    assert 'engine.url = "" is empty: name one' in problems(folder, head + rest + '[engine]\nkind = "endpoint"\n')
    judge = problems(folder, head + rest + ENDPOINT + '[judge]\nurl = "http://j/v1"\n')
    assert 'judge.model = "" is empty: name the model that judges at judge.url = "http://j/v1"' in judge


@pytest.mark.parametrize("field", ["url", "model", "key_env"])
def test_what_is_said_of_an_endpoint_that_is_not_asked_is_refused(folder: Path, field: str) -> None:
    told = problems(folder, "", f"engine.{field}=x")
    assert told == (
        f'engine.{field} = "x" with engine.kind = "embedded", which asks no endpoint: '
        f'write engine.kind = "endpoint", or leave engine.{field} out'
    )


@pytest.mark.parametrize("field", ["model", "key_env"])
def test_what_is_said_of_a_judge_that_is_not_asked_is_refused(folder: Path, field: str) -> None:
    told = problems(folder, "", f"judge.{field}=x")
    assert told == f'judge.{field} = "x" without judge.url asks nobody: write judge.url, or leave judge.{field} out'


@pytest.mark.parametrize("store", ["", "/mnt/weights", "s3://bucket", "s3://a.bucket/and/a_prefix/", "nats"])
def test_weights_are_published_in_a_folder_in_s3_or_on_the_bus(folder: Path, store: str) -> None:
    assert load_run_file(folder / "run.toml", (f"weights.store={store}",)).weights.store == store


@pytest.mark.parametrize(
    "store",
    ["weights", "./weights", "/a/../b", "gs://bucket/x", "s3://", "s3://B", "s3://b/x", "s3://bucket//x", "nats://x"],
)
def test_another_place_for_weights_is_refused_with_those_that_there_are(folder: Path, store: str) -> None:
    said = problems(folder, "", f"weights.store={store}")
    assert f'weights.store = "{store}" is no place for weights' in said
    assert '"s3://bucket/prefix", or "nats"' in said


@pytest.mark.parametrize(
    ("harness", "options", "said"),
    [
        ("mini-swe-agent", "{cpus=1e-7}", "write environment.limits.cpus"),
        (
            "mini-swe-agent",
            "{steps=3}",
            'environment.options.steps = 3 is no option of harness "mini-swe-agent": write ',
        ),
        (
            "mini-swe-agent",
            "{step_limit=0}",
            "environment.options.step_limit = 0 is not a whole number of 1 or more: write",
        ),
        ("mini", "{step_limit='x'}", 'environment.options.step_limit = "x" is not a whole number of 1 or more: write'),
        ("mini", "{config='one_repli'}", 'did you mean "one_reply"?'),
        (
            "mini",
            "{turns=3}",
            'environment.options.turns = 3 is no option of harness "mini": write',
        ),
        ("openai-script", "{turns=0}", "environment.options.turns = 0 is not a whole number of 1 or more: write"),
        ("openai-script", "{config='one_reply'}", 'is no option of harness "openai-script": write one of tools, turns'),
    ],
)
def test_an_option_that_the_environment_does_not_take_is_refused(
    folder: Path, harness: str, options: str, said: str
) -> None:
    shell = ("environment.name=shell", f"environment.harness={harness}")
    assert said in problems(folder, "", *shell, f"environment.options={options}")
    taken = load_run_file(folder / "run.toml", [*shell, "environment.options={}"])
    assert taken.environment.options == {}


def test_options_of_a_compared_harness_are_checked_too_and_our_loop_takes_turns(folder: Path) -> None:
    compared = ("environment.name=claw_eval", "environment.harness=react", "evaluation.harnesses=['react']")
    said = problems(folder, "", *compared, "evaluation.harness_options={react={sistem='x'}}")
    assert 'evaluation.harness_options.react.sistem = "x" is no option of harness "react": write one of ' in said
    load_run_file(folder / "run.toml", [*compared, "evaluation.harness_options={react={system='x', turns=3}}"])


def test_tasks_that_cannot_be_read_are_a_problem_of_the_environment(folder: Path) -> None:
    refuses = "from openforge.env.contract import BadTask\n\ndef tasks():\n    raise BadTask('/typo holds no task')\n"
    (folder / "env.py").write_text(ENVIRONMENT + refuses)
    told = problems(folder)
    assert told.startswith("environment.name = ")
    assert told.endswith("cannot be used: /typo holds no task")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero (line 1 of "),
        ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3 (line 1 of "),
        ("this is no python", "cannot be loaded: SyntaxError: invalid syntax (env.py, line 1)"),
        (ENVIRONMENT + "def tasks(): raise KeyError('x')", "its tasks() breaks: KeyError: 'x' (line "),
        (ENVIRONMENT + "def tasks(): return []", "its tasks() returns none: return at least one task template"),
    ],
)
def test_an_environment_that_breaks_is_one_problem_of_the_run_file(folder: Path, code: str, said: str) -> None:
    (folder / "env.py").write_text(code)
    told = problems(folder)
    assert told.startswith("environment.name = ")
    assert said in told


def test_services_that_have_no_yaml_can_read_a_configuration() -> None:
    code = "import sys, openforge.runs; print('yaml' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run((sys.executable, "-c", code), env=env, capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "False"
