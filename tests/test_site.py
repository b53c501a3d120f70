"""The documentation as a browser shows it from a folder: colours, code, formulas, search."""

import re
import sys
from pathlib import Path

import pytest

from browser import ask, needs_chromium
from processes import Processes

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
pytest.importorskip("ziafont")

ROOT = Path(__file__).parents[1]
WORDS = ("transformer", "resnet", "ddp", "loader", "out-of-distribution")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    started = Processes()  # The fixture would end with one test; the site serves them all.
    try:
        started.run(command, cwd=ROOT)
    finally:
        started.end()
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    loaded = (
        r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
    )
    for page in site.rglob("*.html"):
        assert not re.search(loaded, page.read_text("utf-8")), page


def test_formulas_are_drawn_with_their_words(site):
    source = (ROOT / "docs" / "maths.md").read_text("utf-8")
    html = (site / "maths.html").read_text("utf-8")
    formulas = re.findall(r'<div class="formula"><svg[^>]* aria-label="([^"]+)"', html)
    assert len(formulas) == source.count("```math") > 10
    assert all("\\" in formula or "=" in formula for formula in formulas)


COLOURS = """
  return {
    scheme: document.body.dataset.mdColorScheme,
    background: colour("body", "backgroundColor"),
    formula: colour(".formula path", "fill"),
    text: colour(".md-typeset", "color"),
  };
"""


@needs_chromium
@pytest.mark.parametrize(
    ("scheme", "name", "background"),
    [("light", "default", "rgb(255, 255, 255)"), ("dark", "slate", "rgb(30, 33, 41)")],
)
def test_colours_follow_the_system(site, tmp_path, scheme, name, background):
    answer = ask(site / "maths.html", COLOURS, width=1280, scheme=scheme, profile=tmp_path)
    assert answer["problems"] == []
    assert answer["scheme"] == name
    assert answer["background"] == background
    assert answer["formula"] == answer["text"]


CUT = """return {
  code: cut("pre > code"), cells: cut(".md-typeset td"), formulas: cut(".formula"),
  verdicts: [...document.querySelectorAll("td[data-name=verdict]")].filter(
    (each) => each.getBoundingClientRect().right > innerWidth).length,
};"""


@needs_chromium
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize(
    "page", ["maths", "results", "tutorials/train", "api/layers", "how_to/resnets"]
)
def test_nothing_is_cut_on_any_screen(site, tmp_path, page, width):
    answer = ask(site / f"{page}.html", CUT, width=width, scheme="light", profile=tmp_path)
    assert answer == {
        "problems": [],
        "width": width,
        "overflow": 0,
        "code": [],
        "cells": [],
        "formulas": [],
        "verdicts": 0,
    }


SEARCH = """
  const field = document.querySelector("[data-md-component=search-query]");
  field.focus();
  const found = {};
  for (const word of WORDS) {
    field.value = word;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    field.dispatchEvent(new Event("keyup", { bubbles: true }));
    await pause(1500);
    found[word] = count(".md-search-result__item");
  }
  return { found };
"""


@needs_chromium
def test_search_works_from_a_folder(site, tmp_path):
    script = SEARCH.replace("WORDS", str([*WORDS, "zzzznothing"]))
    answer = ask(site / "index.html", script, width=1280, scheme="light", profile=tmp_path)
    found = answer["found"]
    assert found.pop("zzzznothing") == 0
    assert all(found[word] > 0 for word in WORDS), found
    assert answer["problems"] == []
