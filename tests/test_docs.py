"""The documentation's Python blocks run, page by page, and its API pages miss no public name."""

import os
import re
import socket
import sys
from importlib import import_module
from pathlib import Path

import pytest

import zeromean as zm
from zeromean import registry

DOCS = Path(__file__).parents[1] / "docs"
# A block of text right behind one of Python is what that one prints.
FENCE = re.compile(
    r"^```python\n(.*?)^```$(?:\s+^```text\n(.*?)^```$)?", flags=re.DOTALL | re.MULTILINE
)
# Their `__all__` is public next to what `zeromean` itself has.
PUBLIC_PACKAGES = (
    *("data", "estimators", "export", "functional", "layers", "models", "prediction"),
    *("samplers", "training", "uncertainty"),
)


def blocks(page):
    """Python blocks of a page, and what they print.

    Each is behind so many empty lines that tracebacks point into it.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield "\n" * text.count("\n", 0, match.start(1)) + match.group(1), match.group(2)


PAGES = [
    page
    for page in sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    if any(True for _ in blocks(page))
]


@pytest.fixture
def shipped_parts(monkeypatch):
    """Registries as a reader's process has them, whatever tests and other pages registered."""
    for name in zm.__all__:  # Parts register themselves once, when they are first imported.
        getattr(zm, name)
    for known in registry.REGISTRIES.values():
        monkeypatch.setattr(known, "_parts", {name: known[name] for name in known.shipped})


@pytest.mark.parametrize("page", PAGES)
def test_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys, shipped_parts):
    monkeypatch.chdir(tmp_path)  # For the files that a page writes.
    namespace = {"__name__": page}
    for block, printed in blocks(page):
        capsys.readouterr()
        exec(compile(block, str(DOCS / page), "exec"), namespace)
        if printed is not None:
            assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_page_on_many_processes_runs_in_two(processes, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("".join(block for block, _ in blocks("how_to/many_processes.md")), "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What torchrun sets; without it there is no process in between that could leave others behind.
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        processes.start([sys.executable, script], env=os.environ | common | {"RANK": str(rank)})
        for rank in range(2)
    ]
    said = [processes.finish(rank) for rank in ranks]
    assert [each.returncode for each in said] == [0, 0], [each.stderr for each in said]
    assert "2 processes, 40 samples: accuracy" in said[0].stdout


def test_api_pages_name_everything_public():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    documented = {
        name.rsplit(".", 1)[-1] for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    }
    assert not set(zm.__all__) - documented
    for package in PUBLIC_PACKAGES:
        assert not set(import_module(f"zeromean.{package}").__all__) - documented, package


def test_what_pages_refer_to_is_there():
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
            found = zm
            for part in name.split(".")[1:]:
                # Not by import first: an old path may have the name of a function.
                found = getattr(found, part, None) or import_module(f"{found.__name__}.{part}")
        for target in re.findall(r"!?\[[^\]]+\]\(([^)#:]+)[^):]*\)", text):
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_results_that_pages_name_have_a_record():
    records = DOCS.parent / "results" / "experiments"
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"\[Results\]\([^)]+\),\s+`(\w+)`", text):
            assert (records / f"{name}.json").exists(), f"{path}: {name}"


def test_pages_load_nothing_from_elsewhere():
    for path in DOCS.rglob("*.md"):
        assert not re.search(r"<(script|link|img|iframe)\b", path.read_text(encoding="utf-8")), path


def test_results_are_those_of_the_records(tmp_path):
    pytest.importorskip("jinja2")
    from zeromean import cli

    options = ["--results", str(DOCS.parent / "results" / "experiments")]
    options += ["--output", str(tmp_path / "report.html"), "--markdown", str(tmp_path / "a.md")]
    assert cli.main(["report", *options]) == 0
    assert (tmp_path / "a.md").read_text("utf-8") == (DOCS / "results.md").read_text("utf-8")


@pytest.mark.parametrize("page", sorted((DOCS / "developer").glob("*.md")), ids=lambda p: p.stem)
def test_files_that_developer_pages_name_are_there(page):
    source = DOCS.parent / "src" / "zeromean"
    for name in re.findall(r"`([\w/]+\.py|[\w/]+/)`", page.read_text(encoding="utf-8")):
        places = [source, source.parent, source.parents[1], *source.iterdir()]
        assert any((place / name).exists() for place in places), f"{page}: {name}"


def test_what_the_coverage_table_names_is_there():
    text = (DOCS / "coverage.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`zm\.(\w+)", text)):
        assert hasattr(zm, name), name
    known = {path.stem for path in Path(zm.__file__).parent.joinpath("experiments").rglob("*.py")}
    others = {"posteriors", "blackjax"}
    assert set(re.findall(r"`([a-z0-9_]+)`", text)) <= known | others
