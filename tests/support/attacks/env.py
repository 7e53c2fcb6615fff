"""An environment whose agent asks the model once and then does what its instruction says: one of the hacks."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attacks.hacks import CALLS_OF_OTHERS, HACKS, KEY_LEFT_BEHIND, Hack
from openforge.env.contract import CommandAgent, HarnessKind, LlmArgs, TaskFile, TaskInstance, TaskTemplate

HARNESSES: Mapping[str, HarnessKind] = {"agent": "command"}
ASK = """
import json, os, subprocess, sys, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "what now?"}]}).encode()
head = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["URL"] + "/chat/completions", body, head), timeout=60).read()
raise SystemExit(subprocess.run(["/bin/bash", "-c", sys.argv[1]]).returncode)
"""


class HackTask:
    fixed = True

    def __init__(self, hack: Hack, *, honest: bool) -> None:
        self.id = f"{hack.name}-honest" if honest else hack.name
        self._hack = hack
        self._script = hack.reference if honest else hack.script

    def draw(self, seed: int, split: Literal["train", "heldout"]) -> TaskInstance:
        hack = self._hack
        tests = {"check.sh": hack.check, **hack.tests}
        return TaskInstance(
            task=self.id,
            seed=seed,
            split=split,
            instruction=self._script,
            workspace={"run.sh": TaskFile(content=b"true\n")},
            tests={name: TaskFile(content=text.encode()) for name, text in tests.items()},
            reference=hack.reference,
            verify=("/bin/sh", "/tests/check.sh"),
            verify_timeout_s=hack.check_s,
        )


def tasks() -> Sequence[TaskTemplate]:
    return [
        HackTask(hack, honest=honest) for hack in (*HACKS, CALLS_OF_OTHERS, KEY_LEFT_BEHIND) for honest in (False, True)
    ]


def create_command(*, harness: str, instruction: str, llm_args: LlmArgs, **options: Any) -> CommandAgent:
    env = {"URL": llm_args.base_url, "KEY": llm_args.api_key}
    return CommandAgent(argv=("/usr/bin/python3", "-I", "-c", ASK, instruction), env=env)
