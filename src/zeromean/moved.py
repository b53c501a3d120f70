"""Old import paths: they still work in this version, and say where the module has gone."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

# Documented in 0.1: the old module, and those that have what it had.
MOVED: dict[str, tuple[str, ...]] = {
    "batchnorm": ("conversion.batchnorm",),
    "certificate": ("conversion.certificate",),
    "compression.adapters": ("compression.modules.adapters",),
    "compression.batch_last": ("compression.modules.batch_last",),
    "compression.sparse_layers": ("compression.modules.sparse_layers",),
    "convert": ("conversion.make_stochastic", "conversion.to_deterministic"),
    "convolutions": ("layers.convolution",),
    "demo": ("experiments.demo",),
    "dropout": ("layers.dropout",),
    "experiments.claims": ("experiments.runs.claims",),
    "experiments.cli": ("cli",),
    "experiments.figure": ("experiments.runs.figure",),
    "experiments.run_log": ("experiments.runs.log", "experiments.runs.json_files"),
    "experiments.runner": (
        "experiments.runs.runner",
        "experiments.runs.identity",
        "experiments.runs.processes",
        "experiments.runs.provenance",
    ),
    "held": ("samplers.fixed_noise",),
    "int8": ("compression.int8",),
    "likelihoods": ("training.likelihoods",),
    "linear_maps": ("samplers.linear_maps",),
    "noise": ("distributions.noise",),
    "objectives": ("training.objective", "training.parameter_groups"),
    "posteriors": ("distributions.posteriors", "distributions.posteriors.posterior"),
    "priors": ("distributions.priors",),
    "prune": ("compression.prune",),
    "quantize": ("compression.quantize",),
    "recurrent": ("layers.recurrent",),
    "report": ("experiments.report",),
    "sampling": ("layers.blocks",),
    "serialization": ("files.model", "files.safetensors"),
    "sparsity": ("compression.sparsity",),
    "stochastic": ("layers.stochastic_module",),
    "training.module": ("training.elbo_module",),
}


class MovedModule(ModuleType):
    """Stands at an old path, and has the names of the modules that are there no longer."""

    def __getattr__(self, name: str) -> Any:
        for home in MOVED[self.__name__.removeprefix("zeromean.")]:
            module = import_module(f"zeromean.{home}")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class Package(ModuleType):
    """A package whose attributes no import of an old path replaces."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, MovedModule):
            super().__setattr__(name, value)


class _OldPaths:
    # Without the base classes of importlib.abc, whose import takes longer than all of this package.

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package == "zeromean" and name in MOVED:
            return ModuleSpec(fullname, cast(Any, self))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return MovedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix("zeromean.")
        now = " and ".join(f"zeromean.{home}" for home in MOVED[name])
        warnings.warn(
            f"{module.__name__} has moved to {now}; the old path goes with version 0.3. What is "
            "public stands in `zeromean` itself, as zm.Linear does.",
            DeprecationWarning,
            stacklevel=_level_of_the_import(),
        )


def _level_of_the_import() -> int:
    """How far up the import statement stands: in between is the import system."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or "importlib" in frame.f_code.co_filename
    ):
        level, frame = level + 1, frame.f_back
    return level


sys.meta_path.append(_OldPaths())
