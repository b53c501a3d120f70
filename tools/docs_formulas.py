"""mkdocs hook: a fence of kind `math` becomes a drawing of its LaTeX while the site is built.

So nothing is loaded to read it, no script and no font, and it is the same in every browser. GitHub
sets the same fences by itself.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import ziafont
import ziamath

# Paths, not references, which would have to be unique in a page.
ziafont.config.svg2 = False
UNITS_PER_EM = 18


def on_config(config: Any) -> None:
    """Tell the Markdown extension that reads fences about ours."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences.setdefault("custom_fences", []).append(
        {"name": "math", "class": "formula", "format": format_fence}
    )


def format_fence(source: str, language: str, css_class: str, *_: Any, **__: Any) -> str:
    """A fence as HTML; the signature is pymdownx's."""
    return f'<div class="{css_class}">{to_svg(source)}</div>'


def to_svg(latex: str) -> str:
    """A formula in the colour of the text and as large as it, with its LaTeX for screen readers.

    Raises:
        ValueError: The LaTeX cannot be read.
    """
    latex = " ".join(latex.split())
    try:
        drawn = ziamath.Latex(latex, size=UNITS_PER_EM, color="currentColor")
    except Exception as error:  # The package has no type for it.
        raise ValueError(f"Cannot set {latex!r} ({error}); mend the LaTeX.") from error
    element = drawn.svgxml()
    for side in ("width", "height"):
        element.set(side, f"{float(element.attrib[side]) / UNITS_PER_EM:.3f}em")
    element.set("role", "img")
    element.set("aria-label", latex)
    return ElementTree.tostring(element, encoding="unicode")
