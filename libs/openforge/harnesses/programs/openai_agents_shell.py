"""An agent with a shell tool on the package `openai-agents`: MODEL INSTRUCTION. Run by that package's interpreter."""

import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def bash(command: str) -> str:
    """Run a command and show its output."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


set_default_openai_api("chat_completions")
agent = Agent(name="Shell", instructions="You work in a Linux shell.", tools=[bash], model=sys.argv[1])
print(Runner.run_sync(agent, sys.argv[2], max_turns=20).final_output)
