"""An agent with a shell tool on the package `smolagents`: MODEL INSTRUCTION SCENARIO. Run by that package's
interpreter. In the scenario `delegation` it manages another such agent.
"""

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


model_id, instruction, scenario = sys.argv[1:]
model = OpenAIServerModel(model_id=model_id)
team = []
if scenario == "delegation":
    about = "Does a job in the same shell and says what it did."
    team.append(ToolCallingAgent(tools=[bash], model=model, name="helper", description=about, max_steps=5))
agent = ToolCallingAgent(tools=[bash], model=model, managed_agents=team, max_steps=20)
print(agent.run(instruction))
