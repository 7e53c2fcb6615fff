"""All harnesses, as data: versions, how each is started without anybody watching, and what its tools are called.

Promises: nothing here is written by a harness's vendor; state and configuration lie in the scratch folder of the
box, and the key in the environment or there.
"""

import json
import re
from pathlib import Path
from typing import Any

from openforge.env.contract import CommandAgent
from openforge.harnesses.harness import HOME, INSIDE, SCRATCH, Harness, Launch, Npm, Pip, ToolUse, UnknownHarness

_PROGRAMS = Path(__file__).parent / "programs"


def find(name: str) -> Harness:
    """Raises `UnknownHarness`."""
    for harness in ALL:
        if harness.name == name:
            return harness
    known = ", ".join(harness.name for harness in ALL)
    raise UnknownHarness(f"harness {name!r} is not in the table: choose from {known}")


# -- Chat Completions


def _pi(launch: Launch) -> CommandAgent:
    model = {"id": launch.model, "contextWindow": launch.context, "maxTokens": launch.max_tokens}
    provider = {
        "baseUrl": f"{launch.base_url}/v1",
        "api": "openai-completions",
        "apiKey": launch.key,
        "models": [model],
    }
    options = ("--model", f"of/{launch.model}", "--no-session", "--approve")
    return CommandAgent(
        argv=(_bin("pi"), "-p", *options, launch.instruction),
        env=_own_home(PI_OFFLINE="1", PI_CODING_AGENT_DIR=f"{HOME}/pi"),
        files={f"{HOME}/pi/models.json": _json({"providers": {"of": provider}})},
    )


def _mini(launch: Launch) -> CommandAgent:
    options = ("-m", f"openai/{launch.model}", "-t", launch.instruction, "-y", "--exit-immediately")
    return CommandAgent(
        argv=(f"{INSIDE}/bin/python", f"{INSIDE}/bin/mini", *options, "-o", f"{SCRATCH}/trajectory.json"),
        env=_own_home(
            OPENAI_API_KEY=launch.key,
            OPENAI_API_BASE=f"{launch.base_url}/v1",
            MSWEA_CONFIGURED="true",
            MSWEA_SILENT_STARTUP="1",
            MSWEA_COST_TRACKING="ignore_errors",
            MSWEA_GLOBAL_CONFIG_DIR=f"{HOME}/mini",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        ),
    )


def _opencode(launch: Launch) -> CommandAgent:
    limit = {"context": launch.context, "output": launch.max_tokens}
    models = {launch.model: {"name": launch.model, "limit": limit, "tool_call": True}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "of",
        "options": {"baseURL": f"{launch.base_url}/v1", "apiKey": launch.key},
        "models": models,
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"of/{launch.model}",
        "small_model": f"of/{launch.model}",
        "provider": {"of": provider},
    }
    return CommandAgent(
        argv=(_bin("opencode"), "run", launch.instruction),
        env=_own_home(
            OPENCODE_DISABLE_AUTOUPDATE="1",
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_LSP_DOWNLOAD="1",
            OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
        ),
        files={f"{HOME}/.config/opencode/opencode.json": _json(settings)},
    )


def _openclaw(launch: Launch) -> CommandAgent:
    free = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    model = {
        "id": launch.model,
        "name": launch.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": launch.context,
        "maxTokens": launch.max_tokens,
        "cost": free,
    }
    provider = {
        "baseUrl": f"{launch.base_url}/v1",
        "apiKey": launch.key,
        "api": "openai-completions",
        "models": [model],
    }
    settings = {
        "models": {"mode": "replace", "providers": {"of": provider}},
        "agents": {"defaults": {"model": {"primary": f"of/{launch.model}"}}},
    }
    file = f"{HOME}/openclaw.json"
    options = ("--config", file, "--model", f"of/{launch.model}", "--cwd", "/workspace", "--timeout", "240", "--json")
    return CommandAgent(
        argv=(_bin("openclaw"), "agent", "exec", *options, launch.instruction),
        env=_own_home(),
        files={file: _json(settings)},
    )


def _qwen(launch: Launch) -> CommandAgent:
    return CommandAgent(
        argv=(_bin("qwen"), "--auth-type", "openai", "--yolo", "-p", launch.instruction),
        env=_own_home(
            OPENAI_API_KEY=launch.key,
            OPENAI_BASE_URL=f"{launch.base_url}/v1",
            OPENAI_MODEL=launch.model,
            QWEN_TELEMETRY_ENABLED="false",
        ),
    )


def _cline(launch: Launch) -> CommandAgent:
    """Two commands: it keeps its key in a file that only its own `auth` writes. Its daemon ends with the box."""
    line = (
        'cline auth openai -k "$KEY" -m "$MODEL" -b "$BASE" </dev/null && exec cline -P openai -m "$MODEL" "$TASK" '
        "</dev/null"
    )
    told = {"KEY": launch.key, "MODEL": launch.model, "BASE": f"{launch.base_url}/v1", "TASK": launch.instruction}
    return CommandAgent(argv=("/bin/sh", "-c", line), env=_own_home(CLINE_TELEMETRY_DISABLED="1", **told))


def _openai_agents(launch: Launch) -> CommandAgent:
    return _program("openai_agents_shell.py", launch, OPENAI_AGENTS_DISABLE_TRACING="1")


def _smolagents(launch: Launch) -> CommandAgent:
    return _program("smolagents_shell.py", launch)


def _browser_use(launch: Launch) -> CommandAgent:
    return _program(
        "browser_use_page.py",
        launch,
        ANONYMIZED_TELEMETRY="false",
        BROWSER_USE_CLOUD_SYNC="false",
        BROWSER_USE_CONFIG_DIR=f"{HOME}/browser-use",
        TIMEOUT_LLM_CALL="600",
    )


# -- Responses, Messages, Gemini


def _codex(launch: Launch) -> CommandAgent:
    settings = "\n".join(
        (
            f'model = "{launch.model}"',
            'model_provider = "of"',
            f"model_context_window = {launch.context}",
            "[model_providers.of]",
            'name = "of"',
            f'base_url = "{launch.base_url}/v1"',
            'env_key = "OF_KEY"',
            'wire_api = "responses"',
            "",
        )
    )
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return CommandAgent(
        argv=(_bin("codex"), "exec", *options, launch.instruction),
        env=_own_home(OF_KEY=launch.key, CODEX_HOME=f"{HOME}/codex"),
        files={f"{HOME}/codex/config.toml": settings.encode()},
    )


def _claude(launch: Launch) -> CommandAgent:
    """With few tools and no thinking, for a prompt that is short and stays as it is."""
    options = ("--dangerously-skip-permissions", "--tools=Bash,Edit,Read,Write", "--model", launch.model)
    return CommandAgent(
        argv=(_bin("claude"), "-p", *options, launch.instruction),
        env=_own_home(
            IS_SANDBOX="1",
            ANTHROPIC_BASE_URL=launch.base_url,
            ANTHROPIC_API_KEY=launch.key,
            DISABLE_AUTOUPDATER="1",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS="1",
            ENABLE_TOOL_SEARCH="false",
            MAX_THINKING_TOKENS="0",
        ),
    )


def _gemini(launch: Launch) -> CommandAgent:
    """It wants a model name that it knows."""
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    return CommandAgent(
        argv=(_bin("gemini"), "--yolo", "-m", "gemini-2.5-pro", "-p", launch.instruction),
        env=_own_home(
            GEMINI_API_KEY=launch.key,
            GOOGLE_GEMINI_BASE_URL=launch.base_url,
            GEMINI_CLI_TRUST_WORKSPACE="true",
            GEMINI_TELEMETRY_ENABLED="false",
        ),
        files={f"{HOME}/.gemini/settings.json": _json(settings)},
    )


def _bin(program: str) -> str:
    return f"{INSIDE}/node_modules/.bin/{program}"


def _own_home(**more: str) -> dict[str, str]:
    return {
        "HOME": HOME,
        "XDG_CONFIG_HOME": f"{HOME}/.config",
        "XDG_DATA_HOME": f"{HOME}/.local/share",
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "XDG_STATE_HOME": f"{HOME}/.local/state",
        **more,
    }


def _program(name: str, launch: Launch, **more: str) -> CommandAgent:
    """A library harness: a short program of ours on it, run by its own interpreter."""
    file = f"{SCRATCH}/{name}"
    return CommandAgent(
        argv=(f"{INSIDE}/bin/python", file, launch.model, launch.instruction),
        env=_own_home(OPENAI_API_KEY=launch.key, OPENAI_BASE_URL=f"{launch.base_url}/v1", **more),
        files={file: (_PROGRAMS / name).read_bytes()},
    )


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _shell(name: str, argument: str = "command") -> Any:
    return lambda command: ToolUse(name, {argument: command})


def _browse(prompt: str) -> str:
    """browser-use's model answers in JSON: open the page, press its three buttons, wait, report."""
    steps = re.findall(r"Step(\d+) maximum", prompt)
    step = int(steps[-1]) if steps else 1
    actions: dict[int, Any] = {1: {"navigate": {"url": "http://127.0.0.1:8765/", "new_tab": False}}}
    for number, button in enumerate(("first", "second", "third"), start=2):
        found = re.findall(rf"\[(\d+)\]<button[^>]*>\s*{button}\b", prompt)
        actions[number] = {"click": {"index": int(found[-1]) if found else 1}}
    actions[5] = {"wait": {"seconds": 1}}
    done = {"done": {"text": "größe ✓ 1\ntwo\nthree", "success": True, "files_to_display": []}}
    said = {"evaluation_previous_goal": "Well.", "memory": f"Step {step}.", "next_goal": "Go on."}
    return json.dumps({**said, "action": [actions.get(step, done)]}, ensure_ascii=False)


_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

ALL: tuple[Harness, ...] = (
    Harness(
        name="pi",
        version="1.6.0",
        dialect="chat",
        install=Npm(package="@earendil-works/pi-coding-agent", program="pi"),
        start=_pi,
        shell=_shell("bash"),
        fast=True,
    ),
    Harness(
        name="mini-swe-agent",
        version="2.4.6",
        dialect="chat",
        install=Pip(package="mini-swe-agent", distribution="mini-swe-agent"),
        start=_mini,
        shell=_shell("bash"),
        finish=ToolUse("bash", {"command": _SUBMIT}),
        fast=True,
    ),
    Harness(
        name="codex",
        version="0.171.0",
        dialect="responses",
        install=Npm(package="@openai/codex", program="codex"),
        start=_codex,
        shell=_shell("exec_command", "cmd"),
        fast=True,
    ),
    Harness(
        name="claude-code",
        version="2.1.332",
        dialect="messages",
        install=Npm(package="@anthropic-ai/claude-code", program="claude"),
        start=_claude,
        shell=_shell("Bash"),
        fast=True,
    ),
    Harness(
        name="opencode",
        version="1.18.33",
        dialect="chat",
        install=Npm(package="opencode-ai", program="opencode"),
        start=_opencode,
        shell=lambda command: ToolUse("bash", {"command": command, "description": "Runs a command"}),
        breaks={"side_call": 1},
        why="asks for a title beside the conversation",
        memory_mb=2048,
        disk_mb=256,
    ),
    Harness(
        name="openclaw",
        version="2026.9.6",
        dialect="chat",
        install=Npm(package="openclaw", program="openclaw"),
        start=_openclaw,
        shell=_shell("exec"),
        breaks={"transient": 5},
        why="ends each prompt with a note that is gone in the next one",
        memory_mb=3072,
        disk_mb=256,
    ),
    Harness(
        name="qwen-code",
        version="0.24.4",
        dialect="chat",
        install=Npm(package="@qwen-code/qwen-code", program="qwen"),
        start=_qwen,
        shell=lambda command: ToolUse(
            "run_shell_command", {"command": command, "is_background": False, "description": "Runs a command"}
        ),
        fatal=frozenset({"cut_in_answer"}),
        memory_mb=3584,
        disk_mb=256,
    ),
    Harness(
        name="gemini-cli",
        version="0.61.0",
        dialect="gemini",
        install=Npm(package="@google/gemini-cli", program="gemini"),
        start=_gemini,
        shell=_shell("run_shell_command"),
        memory_mb=2048,
    ),
    Harness(
        name="cline",
        version="3.0.65",
        dialect="chat",
        install=Npm(package="cline", program="cline"),
        start=_cline,
        shell=lambda command: ToolUse("run_commands", {"commands": [command]}),
        memory_mb=2048,
        disk_mb=256,
    ),
    Harness(
        name="openai-agents",
        version="0.24.0",
        dialect="chat",
        install=Pip(package="openai-agents", distribution="openai-agents"),
        start=_openai_agents,
        shell=_shell("bash"),
    ),
    Harness(
        name="smolagents",
        version="1.26.0",
        dialect="chat",
        install=Pip(package="smolagents[openai]", distribution="smolagents"),
        start=_smolagents,
        shell=_shell("bash"),
        finish=ToolUse("final_answer", {"answer": "Done."}),
        breaks={"rewritten": 5},
        why="writes the assistant's calls back as text of its own",
    ),
    Harness(
        name="browser-use",
        version="0.13.14",
        dialect="chat",
        install=Pip(package="browser-use", distribution="browser-use", apt={"chromium": "chromium"}),
        start=_browser_use,
        shell=_shell("bash"),
        spoken=_browse,
        breaks={"rewritten": 5},
        why="makes a new prompt for each step",
        memory_mb=3072,
        disk_mb=256,
    ),
)
