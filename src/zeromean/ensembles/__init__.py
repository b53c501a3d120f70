"""Several networks as one: deep and snapshot ensembles, averages of weights and draws around them.

Importing this package imports nothing that trains; what trains needs the extra `experiments`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromean.ensembles.deep import deep_ensemble, fit_ensemble
    from zeromean.ensembles.folder import load_ensemble, save_ensemble
    from zeromean.ensembles.snapshots import CosineCycles, Snapshots, fit_snapshots
    from zeromean.ensembles.svgd import fit_svgd, stein_direction, stein_gradients_
    from zeromean.ensembles.weight_averages import SWA, SWAG
    from zeromean.prediction.ensemble import Ensemble

__all__ = [
    "SWA",
    "SWAG",
    "CosineCycles",
    "Ensemble",
    "Snapshots",
    "deep_ensemble",
    "fit_ensemble",
    "fit_snapshots",
    "fit_svgd",
    "load_ensemble",
    "save_ensemble",
    "stein_direction",
    "stein_gradients_",
]

_MODULE_OF = {
    "SWA": "ensembles.weight_averages",
    "SWAG": "ensembles.weight_averages",
    "CosineCycles": "ensembles.snapshots",
    "Ensemble": "prediction.ensemble",
    "Snapshots": "ensembles.snapshots",
    "deep_ensemble": "ensembles.deep",
    "fit_ensemble": "ensembles.deep",
    "fit_snapshots": "ensembles.snapshots",
    "fit_svgd": "ensembles.svgd",
    "load_ensemble": "ensembles.folder",
    "save_ensemble": "ensembles.folder",
    "stein_direction": "ensembles.svgd",
    "stein_gradients_": "ensembles.svgd",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"zeromean.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
