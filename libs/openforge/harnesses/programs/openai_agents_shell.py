"""An agent with a shell tool on the package `openai-agents`: MODEL INSTRUCTION SCENARIO. Run by that package's
interpreter. In the scenario `delegation` it has another such agent as a tool.
"""

import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def bash(command: str) -> str:
    """Run a command and show its output."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


model, instruction, scenario = sys.argv[1:]
set_default_openai_api("chat_completions")
tools = [bash]
if scenario == "delegation":
    helper = Agent(name="Helper", instructions="You help in a Linux shell.", tools=[bash], model=model)
    tools.append(helper.as_tool("helper", "Does a job in the same shell and says what it did."))
agent = Agent(name="Shell", instructions="You work in a Linux shell.", tools=tools, model=model)
print(Runner.run_sync(agent, instruction, max_turns=20).final_output)
