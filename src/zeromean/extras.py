"""Packages that are not installed with zeromean itself, and how to get them."""

from __future__ import annotations

from typing import Literal

# As in pyproject.toml, [project.optional-dependencies].
Extra = Literal[
    "io",
    "export",
    "estimators",
    "dask",
    "cli",
    "experiments",
    "attacks",
    "conformal",
    "transformers",
    "docs",
    "dev",
]


def how_to_install(what: str, extra: Extra) -> str:
    """A sentence for an ImportError: what is needed, and the command that brings it.

    Args:
        what: Who needs which packages: "Files of models need safetensors".
        extra: The set of packages that has them.
    """
    return f"{what}; run, in a checkout of zeromean: pip install '.[{extra}]'"
