"""The recipes for posteriors of other packages, where these are installed."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "how_to" / "other_packages.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


# Neither is an extra, or installed where the other tests run: see the page.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", ["posteriors", "laplace"])
def test_recipe_runs(package):
    pytest.importorskip(package)
    namespace = {}
    for block in (BLOCKS[0], next(each for each in BLOCKS if package in each)):
        exec(compile(block, str(PAGE), "exec"), namespace)


def test_every_block_of_the_page_is_in_a_recipe():
    assert len(BLOCKS) == 3
    assert "posteriors" in BLOCKS[1]
    assert "laplace" in BLOCKS[2]
