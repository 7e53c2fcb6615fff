"""An agent on a local web page with the package `browser-use`: MODEL INSTRUCTION SCENARIO. Run by that package's
interpreter. In the scenario `compaction` it sums up after a few steps.

The page shows three lines, one for each button that was pressed; what the agent says at its end becomes notes.txt.
"""

import asyncio
import http.server
import os
import sys
import threading
from pathlib import Path

from browser_use import Agent, BrowserProfile, ChatOpenAI
from browser_use.agent.views import MessageCompactionSettings

PAGE = """<!doctype html><meta charset="utf-8"><title>Notes</title><h1>Notes</h1><ul id="l"></ul>
<button onclick="add('größe ✓ 1')">first</button> <button onclick="add('two')">second</button>
<button onclick="add('three')">third</button>
<script>
function add(text) { let item = document.createElement('li'); item.textContent = text; l.append(item) }
</script>
""".encode()


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        pass


async def work(model: str, instruction: str, scenario: str) -> str:
    """What the agent says at its end."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 8765), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    profile = BrowserProfile(
        headless=True,
        executable_path="/usr/lib/chromium/chromium",  # Debian's wrapper reads a folder of /etc that boxes do not have
        args=["--disable-dev-shm-usage"],
        chromium_sandbox=False,
        enable_default_extensions=False,
        user_data_dir="/workspace/.browser",  # more than /tmp holds
    )
    llm = ChatOpenAI(model=model, base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    task = f"{instruction}\nThe notes are the page http://127.0.0.1:8765/ : press its buttons, then report the lines."
    soon = MessageCompactionSettings(compact_every_n_steps=4, trigger_char_count=100, keep_last_items=1)
    agent = Agent(
        task=task,
        llm=llm,
        browser_profile=profile,
        use_judge=False,
        llm_timeout=600,
        message_compaction=soon if scenario == "compaction" else True,
    )
    history = await agent.run(max_steps=12)
    return history.final_result() or ""


said = asyncio.run(work(*sys.argv[1:]))
Path("/workspace/notes.txt").write_text(said + "\n", encoding="utf-8")
