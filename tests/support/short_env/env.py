"""An environment by path: one model call by a shell, an answer written down, and everything that an agent may leave."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openforge.env.contract import CommandAgent, HarnessKind, LlmArgs, TaskTemplate
from openforge.env.layout import load_tasks

HARNESSES: dict[str, HarnessKind] = {"short": "command"}
HERE = Path(__file__).parent

SCRIPT = r"""
body='{"model": "policy", "messages": [{"role": "user", "content": "Say a word."}]}'
exec 3<>/dev/tcp/127.0.0.1/$PORT || exit 7
printf 'POST %s/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\n' "$PATH_OF_API" "$KEY" >&3
printf 'Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s' "${#body}" "$body" >&3
cat <&3 > answer.txt
mkdir -p deep/er; ln -s /nowhere deep/er/link; echo left > /tmp/left
(trap '' TERM HUP; exec setsid sleep "$MARK") >/dev/null 2>&1 &
(setsid sh -c 'while :; do sleep "$0"; done' "$MARK") >/dev/null 2>&1 &
exit 0
"""


def tasks() -> Sequence[TaskTemplate]:
    return load_tasks(HERE / "tasks")


def create_command(*, harness: str, instruction: str, llm_args: LlmArgs, **options: Any) -> CommandAgent:
    url = urlsplit(llm_args.base_url)
    env = {"PORT": str(url.port), "PATH_OF_API": url.path, "KEY": llm_args.api_key, "MARK": str(options["mark"])}
    return CommandAgent(argv=("/bin/bash", "-c", SCRIPT), env=env)
