"""Harnesses as programs inside the sandbox: the `mini` command itself, and a script on the `openai` client.

Promises: files of ours lie beside the workspace, never in it; the key travels in the environment only; the
interpreter and its packages are this process's own, shown read-only.
"""

import sys
from pathlib import Path

import yaml

from openforge.env.contract import CommandAgent, LlmArgs
from openforge_envs.shell.mini import AtLeastOne, ConfigName, config_file

HARNESS_FOLDER = "/tmp/harness"
SCRIPT = Path(__file__).parent / "harness" / "openai_script.py"


def mini_command(
    instruction: str, llm_args: LlmArgs, *, config: ConfigName = "one_reply", step_limit: AtLeastOne | None = None
) -> CommandAgent:
    """`mini`, unattended, with a configuration of `harness/` and this attempt's model."""
    settings = yaml.safe_load(config_file(config).read_text())
    if step_limit is not None:
        settings["agent"]["step_limit"] = step_limit
    settings["model"]["model_kwargs"] = sampling(llm_args)
    file = f"{HARNESS_FOLDER}/mini.yaml"
    options = ("-c", file, "-m", f"openai/{llm_args.model}", "-t", instruction, "-y", "--exit-immediately")
    return CommandAgent(
        argv=(sys.executable, "-m", "minisweagent.run.mini", *options, "-o", f"{HARNESS_FOLDER}/trajectory.json"),
        env={
            "OPENAI_API_BASE": llm_args.base_url,
            "OPENAI_API_KEY": llm_args.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": HARNESS_FOLDER,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={file: yaml.safe_dump(settings, sort_keys=False).encode()},
        binds=interpreter(),
    )


def openai_script_command(
    instruction: str, llm_args: LlmArgs, *, turns: AtLeastOne = 4, tools: bool = False
) -> CommandAgent:
    """The script in `harness/openai_script.py`: commands from code blocks, or from tool calls with `tools`."""
    file = f"{HARNESS_FOLDER}/openai_script.py"
    return CommandAgent(
        argv=(sys.executable, file, instruction),
        env={
            "OPENAI_BASE_URL": llm_args.base_url,
            "OPENAI_API_KEY": llm_args.api_key,
            "AGENT_MODEL": llm_args.model,
            "AGENT_TURNS": str(turns),
            "AGENT_TOOLS": "1" if tools else "",
        },
        files={file: SCRIPT.read_bytes()},
        binds=interpreter(),
    )


def sampling(llm_args: LlmArgs) -> dict[str, object]:
    """What we ask for; the proxy pins it anyway."""
    asked: dict[str, object] = {
        "temperature": llm_args.temperature,
        "top_p": llm_args.top_p,
        "max_tokens": llm_args.max_tokens,
    }
    return asked | ({"stop": list(llm_args.stop)} if llm_args.stop else {})


def interpreter() -> dict[str, str]:
    """Folders of the Python that runs this, at the same path; those below /usr every sandbox has."""
    folders = {sys.prefix, sys.base_prefix}
    return {folder: folder for folder in sorted(folders) if not Path(folder).is_relative_to("/usr")}
