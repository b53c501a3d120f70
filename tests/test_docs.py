"""The documentation's Python blocks run, page by page, and its API pages miss no public name."""

import re
from pathlib import Path
from types import ModuleType

import pytest

import zeromean as zm

DOCS = Path(__file__).parents[1] / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def blocks(page):
    """Python blocks of a page, each behind so many empty lines that tracebacks point into it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield "\n" * text.count("\n", 0, match.start(1)) + match.group(1)


PAGES = [
    page
    for page in sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    if any(True for _ in blocks(page))
]


@pytest.mark.parametrize("page", PAGES)
def test_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # For the files that a page writes.
    namespace = {"__name__": page}
    for block in blocks(page):
        exec(compile(block, str(DOCS / page), "exec"), namespace)


def test_api_pages_name_everything_public():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    documented = {
        name.rsplit(".", 1)[-1] for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    }
    public = {
        name
        for name, value in vars(zm).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert not public - documented


def test_pages_load_nothing_from_elsewhere():
    for path in DOCS.rglob("*.md"):
        assert not re.search(r"<(script|link|img|iframe)\b", path.read_text(encoding="utf-8")), path
