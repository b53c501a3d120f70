"""Several networks as one: deep and snapshot ensembles, averages of weights and draws around them.

Importing this package imports nothing that trains; what trains needs the extra `experiments`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromean.ensembles.deep import deep_ensemble, fit_ensemble
    from zeromean.ensembles.ensemble import Ensemble
    from zeromean.ensembles.folder import load_ensemble, save_ensemble
    from zeromean.ensembles.snapshots import CosineCycles, Snapshots, fit_snapshots
    from zeromean.ensembles.weight_averages import SWA, SWAG

__all__ = [
    "SWA",
    "SWAG",
    "CosineCycles",
    "Ensemble",
    "Snapshots",
    "deep_ensemble",
    "fit_ensemble",
    "fit_snapshots",
    "load_ensemble",
    "save_ensemble",
]

_MODULE_OF = {
    "SWA": "weight_averages",
    "SWAG": "weight_averages",
    "CosineCycles": "snapshots",
    "Ensemble": "ensemble",
    "Snapshots": "snapshots",
    "deep_ensemble": "deep",
    "fit_ensemble": "deep",
    "fit_snapshots": "snapshots",
    "load_ensemble": "folder",
    "save_ensemble": "folder",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"zeromean.ensembles.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
