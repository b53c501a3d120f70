import re
import tomllib
from pathlib import Path
from typing import get_args

from zeromean.extras import Extra, how_to_install

ROOT = Path(__file__).parents[1]


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(get_args(Extra)) == set(project["optional-dependencies"])


def test_the_command_works_from_a_checkout():
    """zeromean is on no package index: `pip install zeromean` would not find it."""
    assert how_to_install("This needs that", "io") == (
        "This needs that; run, in a checkout of zeromean: pip install '.[io]'"
    )
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"pip install '?zeromean", path.read_text()), path
