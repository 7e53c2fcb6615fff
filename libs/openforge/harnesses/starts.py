"""How each harness is started without anybody watching.

Promises: nothing here is written by a harness's vendor; state and configuration lie in the scratch folder of the
box, and the key in the environment or there.
"""

import json
from pathlib import Path
from typing import Any

from openforge.env.contract import CommandAgent
from openforge.harnesses.harness import HOME, INSIDE, SCRATCH, Launch

_PROGRAMS = Path(__file__).parent / "programs"


# -- Chat Completions


def pi(launch: Launch) -> CommandAgent:
    model = {
        "id": launch.model,
        "reasoning": launch.scenario == "thinking",
        "contextWindow": launch.context,
        "maxTokens": launch.max_tokens,
    }
    provider = {
        "baseUrl": launch.v1,
        "api": "openai-completions",
        "apiKey": launch.key,
        "models": [model],
    }
    settings = {}
    if launch.scenario == "compaction":
        settings["compaction"] = {"reserveTokens": launch.context - 4000, "keepRecentTokens": 50}
    options = ("--model", f"of/{launch.model}", "--no-session", "--approve")
    return CommandAgent(
        argv=(_bin("pi"), "-p", *options, launch.instruction),
        env=_own_home(PI_OFFLINE="1", PI_CODING_AGENT_DIR=f"{HOME}/pi"),
        files={
            f"{HOME}/pi/models.json": _json({"providers": {"of": provider}}),
            f"{HOME}/pi/settings.json": _json(settings),
        },
    )


def mini(launch: Launch) -> CommandAgent:
    options = ("-m", f"openai/{launch.model}", "-t", launch.instruction, "-y", "--exit-immediately")
    return CommandAgent(
        argv=(f"{INSIDE}/bin/python", f"{INSIDE}/bin/mini", *options, "-o", f"{SCRATCH}/trajectory.json"),
        env=_own_home(
            OPENAI_API_KEY=launch.key,
            OPENAI_API_BASE=launch.v1,
            MSWEA_CONFIGURED="true",
            MSWEA_SILENT_STARTUP="1",
            MSWEA_COST_TRACKING="ignore_errors",
            MSWEA_GLOBAL_CONFIG_DIR=f"{HOME}/mini",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        ),
    )


def opencode(launch: Launch) -> CommandAgent:
    summing_up = launch.scenario == "compaction"
    limit = {"context": 12_000 if summing_up else launch.context, "output": launch.max_tokens}
    reasoning = {"reasoning": True} if launch.scenario == "thinking" else {}
    models = {launch.model: {"name": launch.model, "limit": limit, "tool_call": True, **reasoning}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "of",
        "options": {"baseURL": launch.v1, "apiKey": launch.key},
        "models": models,
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"of/{launch.model}",
        "small_model": f"of/{launch.model}",
        "provider": {"of": provider},
        **({"compaction": {"tail_turns": 0}} if summing_up else {}),
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


def openclaw(launch: Launch) -> CommandAgent:
    free = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    model = {
        "id": launch.model,
        "name": launch.model,
        "reasoning": launch.scenario == "thinking",
        "input": ["text"],
        "contextWindow": 12_000 if launch.scenario == "compaction" else launch.context,
        "maxTokens": launch.max_tokens,
        "cost": free,
    }
    provider = {
        "baseUrl": launch.v1,
        "apiKey": launch.key,
        "api": "openai-completions",
        "models": [model],
    }
    compaction: dict[str, Any] = {}
    if launch.scenario == "compaction":
        compaction["compaction"] = {"mode": "default", "keepRecentTokens": 50}
    settings = {
        "models": {"mode": "replace", "providers": {"of": provider}},
        "agents": {"defaults": {"model": {"primary": f"of/{launch.model}"}, **compaction}},
    }
    file = f"{HOME}/openclaw.json"
    options = ("--config", file, "--model", f"of/{launch.model}", "--cwd", "/workspace", "--timeout", "240", "--json")
    return CommandAgent(
        argv=(_bin("openclaw"), "agent", "exec", *options, launch.instruction),
        env=_own_home(),
        files={file: _json(settings)},
    )


def qwen(launch: Launch) -> CommandAgent:
    settings: dict[str, Any] = {"model": {"generationConfig": {"contextWindowSize": launch.context}}}
    if launch.scenario == "compaction":
        settings["context"] = {"autoCompactThreshold": 21_000 / launch.context}
    return CommandAgent(
        argv=(_bin("qwen"), "--auth-type", "openai", "--yolo", "-p", launch.instruction),
        env=_openai_home(launch, OPENAI_MODEL=launch.model, QWEN_TELEMETRY_ENABLED="false"),
        files={f"{HOME}/.qwen/settings.json": _json(settings)},
    )


def cline(launch: Launch) -> CommandAgent:
    """Two commands: it keeps its key in a file that only its own `auth` writes. Its daemon ends with the box."""
    line = (
        'cline auth openai -k "$KEY" -m "$MODEL" -b "$BASE" </dev/null && exec cline -P openai -m "$MODEL" "$TASK" '
        "</dev/null"
    )
    told = {"KEY": launch.key, "MODEL": launch.model, "BASE": launch.v1, "TASK": launch.instruction}
    return CommandAgent(argv=("/bin/sh", "-c", line), env=_own_home(CLINE_TELEMETRY_DISABLED="1", **told))


def openai_agents(launch: Launch) -> CommandAgent:
    return _program("openai_agents_shell.py", launch, OPENAI_AGENTS_DISABLE_TRACING="1")


def smolagents(launch: Launch) -> CommandAgent:
    return _program("smolagents_shell.py", launch)


def browser_use(launch: Launch) -> CommandAgent:
    return _program(
        "browser_use_page.py",
        launch,
        ANONYMIZED_TELEMETRY="false",
        BROWSER_USE_CLOUD_SYNC="false",
        BROWSER_USE_CONFIG_DIR=f"{HOME}/browser-use",
        TIMEOUT_LLM_CALL="600",
    )


# -- Responses, Messages, Gemini


def codex(launch: Launch) -> CommandAgent:
    settings = "\n".join(
        (
            f'model = "{launch.model}"',
            'model_provider = "of"',
            f"model_context_window = {launch.context}",
            *(("model_auto_compact_token_limit = 12000",) if launch.scenario == "compaction" else ()),
            "[model_providers.of]",
            'name = "of"',
            f'base_url = "{launch.v1}"',
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


def claude(launch: Launch) -> CommandAgent:
    """With few tools and no thinking but where these are the point, for a prompt that is short and stays as it is."""
    tools = ("Bash", "Edit", "Read", "Write", *(("Agent",) if launch.scenario == "delegation" else ()))
    options = ("--dangerously-skip-permissions", f"--tools={','.join(tools)}", "--model", launch.model)
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
            **_CLAUDE.get(launch.scenario, _NO_THINKING),
        ),
    )


_NO_THINKING = {"MAX_THINKING_TOKENS": "0"}
_CLAUDE: dict[str, dict[str, str]] = {
    "thinking": {},
    "compaction": {**_NO_THINKING, "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "8"},
}


def gemini(launch: Launch) -> CommandAgent:
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


def _openai_home(launch: Launch, **more: str) -> dict[str, str]:
    """With the variables of OpenAI's own clients."""
    return _own_home(OPENAI_API_KEY=launch.key, OPENAI_BASE_URL=launch.v1, **more)


def _program(name: str, launch: Launch, **more: str) -> CommandAgent:
    """A library harness: a short program of ours on it, run by its own interpreter."""
    file = f"{SCRATCH}/{name}"
    return CommandAgent(
        argv=(f"{INSIDE}/bin/python", file, launch.model, launch.instruction, launch.scenario),
        env=_openai_home(launch, **more),
        files={file: (_PROGRAMS / name).read_bytes()},
    )


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
