"""An agent with a shell tool on the package `smolagents`: MODEL INSTRUCTION. Run by that package's interpreter."""

import subprocess
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a command and show its output.

    Args:
        command: The command line.
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


agent = ToolCallingAgent(tools=[bash], model=OpenAIServerModel(model_id=sys.argv[1]), max_steps=20)
print(agent.run(sys.argv[2]))
