from pathlib import Path

from openforge.cli.run_file_docs import PAGE, page


def test_the_run_file_page_is_what_the_code_says() -> None:
    written = Path(__file__).parents[3] / PAGE
    assert written.read_text() == page(), "run: python -m openforge.cli.run_file_docs"
