"""The part of the pipeline that needs mini-swe-agent: import it in a thread, once.

Promises: mini-swe-agent's classes run as published, with a configuration file in its own format; it
prints nothing and asks nobody about prices; each way in which an episode can end has one status.
"""

import atexit
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from openforge.env.contract import EnvCallResult, LlmArgs
from openforge.sandbox.contract import SandboxLost
from openforge_envs.shell.commands import sampling
from openforge_envs.shell.mini import BlockingSandbox, Cancelled

# mini-swe-agent and litellm read these while they are imported. None of them differs between episodes.
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_CONFIGURED", "true")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(Path(tempfile.gettempdir()) / f"mini-swe-agent-{os.getuid()}"))
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "6")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import httpx
import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from minisweagent.models import get_model

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MODEL_CALL_TIMEOUT_S = 600.0

# What asking again does not change: a request that is refused for what it is, or since the attempt has ended.
REFUSALS = (litellm.exceptions.BadRequestError, litellm.exceptions.APIError)

MODEL_ERRORS = tuple(litellm.exceptions.LITELLM_EXCEPTION_TYPES)

_STATUS_OF_EXIT = {
    "Submitted": "finished",
    "LimitsExceeded": "out_of_turns",
    "TimeExceeded": "out_of_turns",
    "RepeatedFormatError": "gave_up",
}

# One connection pool for all episodes: litellm would open one for each key.
litellm.client_session = httpx.Client(timeout=MODEL_CALL_TIMEOUT_S, limits=httpx.Limits(max_connections=256))
atexit.register(litellm.client_session.close)
litellm.suppress_debug_info = True
for _name in ("LiteLLM", "litellm_model", "minisweagent", "httpx"):
    logging.getLogger(_name).handlers.clear()
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class SandboxEnvironment:
    """mini-swe-agent's `Environment`: its actions run in the sandbox, with its own submit convention."""

    def __init__(self, sandbox: BlockingSandbox, *, timeout: float = 30.0, env: dict[str, str] | None = None) -> None:
        self.config = {"timeout": timeout, "env": env or {}}
        self.commands = 0
        self._sandbox = sandbox
        self._timeout_s = timeout
        self._env = env or {}

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        self.commands += 1
        done = self._sandbox.bash(action["command"], timeout_s=self._timeout_s, env=self._env)
        text = done.stdout.decode("utf-8", errors="replace")
        if done.timed_out:
            return {"output": text, "returncode": -1, "exception_info": f"timed out after {self._timeout_s:g} seconds"}
        first, _, rest = text.lstrip().partition("\n")
        if first.strip() == SUBMIT and done.exit_code == 0:
            raise Submitted(
                {"role": "exit", "content": rest, "extra": {"exit_status": "Submitted", "submission": rest}}
            )
        return {"output": text, "returncode": done.exit_code, "exception_info": ""}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        return {"cwd": "/workspace", "system": "Linux", **more}

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"environment": self.config, "environment_type": type(self).__name__}}}


def run_episode(
    sandbox: BlockingSandbox, config_file: Path, instruction: str, llm_args: LlmArgs, *, step_limit: int | None = None
) -> EnvCallResult:
    """Work on the instruction until mini-swe-agent ends; never raises for what an episode can meet."""
    config = _config(config_file)
    limits = {} if step_limit is None else {"step_limit": step_limit}
    environment = SandboxEnvironment(sandbox, **config.get("environment", {}))
    agent = DefaultAgent(_model(config["model"], llm_args), environment, **(config["agent"] | limits))
    status, cause = _run(agent, instruction)
    errors = sum(1 for message in agent.messages if _is_format_error(message))
    metrics = {"turns": agent.n_calls, "commands": environment.commands, "format_errors": errors}
    return EnvCallResult(status=status, cause=cause, metrics={name: float(value) for name, value in metrics.items()})


def _run(agent: Any, instruction: str) -> tuple[Any, str]:
    """How the episode ended and, where the policy cannot have caused that, or the agent crashed, why."""
    try:
        exit_status = agent.run(instruction)["exit_status"]
    except litellm.exceptions.ContextWindowExceededError:
        return "out_of_context", ""
    except (SandboxLost, Cancelled) as error:
        return "censored", f"sandbox: {error or type(error).__name__}"
    except MODEL_ERRORS as error:
        return "censored", f"model call: {type(error).__name__}: {error}"[:400]
    except Exception as error:  # boundary: whatever else a conversation can break in the harness is its own doing
        return "agent_crashed", f"{type(error).__name__}: {error}"[:400]
    return _STATUS_OF_EXIT.get(exit_status, "gave_up"), ""


def _model(config: dict[str, Any], llm_args: LlmArgs) -> Any:
    reached = {"api_base": llm_args.base_url, "api_key": llm_args.api_key, "timeout": MODEL_CALL_TIMEOUT_S}
    kwargs = config.get("model_kwargs", {}) | sampling(llm_args) | reached
    model = get_model(config=config | {"model_name": f"openai/{llm_args.model}", "model_kwargs": kwargs})
    model.abort_exceptions = [*model.abort_exceptions, *REFUSALS]
    return model


@cache
def _config(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text()))


def _is_format_error(message: dict[str, Any]) -> bool:
    return bool(message.get("extra", {}).get("interrupt_type") == "FormatError")
