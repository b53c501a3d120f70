"""What `make package` relies on; it builds and installs the package, which takes a network."""

import importlib.util
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_extra_is_resolved():
    spec = importlib.util.spec_from_file_location("package", ROOT / "tools" / "package.py")
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    assert set(package.EXTRAS) == set(PYPROJECT["project"]["optional-dependencies"])


def test_the_description_has_no_links_that_lead_nowhere():
    """Where a package is shown, nothing lies next to its README."""
    text = (ROOT / "README.md").read_text("utf-8")
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", text)
    assert "![" not in text
    assert "(docs/" not in text
    assert "Reproduce says how to run them" in text


def test_what_builds_the_package_is_pinned():
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    }
    needed = [*PYPROJECT["build-system"]["requires"], "build", "twine"]
    assert {re.split(r"[<>=]", name)[0].lower() for name in needed} <= pinned
