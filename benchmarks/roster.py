"""Finds a subject by name; packages that are not installed are skipped, not fatal."""

import importlib
import importlib.metadata

import subjects
from subjects import Subject

# In the order of the tables.
FILES = {
    "zeromean": "ours",
    "cplxmodule": "peer_cplxmodule",
    "torchbnn": "peer_torchbnn",
    "bayesian-torch": "peer_bayesian_torch",
    "posteriors": "peer_posteriors",
    "blitz": "peer_blitz",
}

PEERS = [
    "cplxmodule VD",
    "cplxmodule ARD",
    "torchbnn",
    "bayesian-torch",
    "bayesian-torch Flipout",
    "posteriors, loop",
    "posteriors, vmap",
    "blitz",
]


class NotInstalledError(Exception):
    """The package behind a subject cannot be imported."""


def subject(name: str) -> Subject:
    """The subject called `name`, whose package is the first word of that name."""
    if name == subjects.DETERMINISTIC.name:
        return subjects.DETERMINISTIC
    module = _load(name.replace(",", " ").split()[0])
    return next(one for one in module.SUBJECTS if one.name == name)


def versions() -> dict[str, str]:
    """Version of every package of the tables, "not installed" where it is absent."""
    found = {}
    for package in FILES:
        try:
            found[package] = _version(_load(package).PACKAGE)
        except NotInstalledError:
            found[package] = "not installed"
        except Exception:  # it cannot be imported; its rows say so, the record must not be lost
            found[package] = "broken"
    return found


def _load(package: str):
    try:
        return importlib.import_module(f"peers.{FILES[package]}")
    except ModuleNotFoundError as error:
        if "." in (error.name or ""):  # a package that is there, but broken
            raise
        raise NotInstalledError(f"{package} is not installed ({error})") from error


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # zeromean, taken from src/ without being installed
        return f"{importlib.import_module(distribution).__version__} (checkout)"
