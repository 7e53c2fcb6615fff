"""One self-contained HTML page about a run, from the streams alone.

Promises: nothing on the page is kept anywhere else; the page needs no network.
"""

from openforge.cli.report.page import write_report
from openforge.cli.report.story import Story, story_of

__all__ = ["Story", "story_of", "write_report"]
