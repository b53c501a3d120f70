"""Runs on a Dask cluster: one for each seed and setting, each where a worker is free."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromean.extras import how_to_install

if TYPE_CHECKING:
    from distributed import Client

    from zeromean.experiments.runs.runner import Place


def run_many(
    name: str, configs: Sequence[Any], *, place: Place, client: Client | str
) -> list[Path]:
    """Run an experiment for every configuration on a cluster, and return the folders of the runs.

    Workers write into `place.runs`, which must be a folder that all of them share. Finished runs
    are skipped, interrupted ones resumed, and what one run raises does not end the others.

    Args:
        configs: Configurations of the experiment, each with the seed of its run.
        client: A `distributed.Client`, or the address of a scheduler.

    Raises:
        ValueError: What the runs have said that can be mended, in a sentence each.
    """
    from zeromean.experiments.runs import runner

    try:
        from distributed import Client
    except ImportError:
        raise ImportError(how_to_install("Runs on a cluster need distributed", "dask")) from None
    folders = [runner.run_folder(name, config, place.runs) for config in configs]
    pending = {
        folder: config
        for folder, config in zip(folders, configs, strict=True)
        if not runner.is_finished(name, config, folder)
    }
    if not pending:
        return folders
    if isinstance(client, str):
        try:
            own = Client(client, timeout="10s")
        except (OSError, ValueError) as error:
            raise ValueError(f"No Dask scheduler answers at {client}: {error}.") from error
        with own:
            _run_on(own, name, list(pending.values()), place)
    else:
        _run_on(client, name, list(pending.values()), place)
    return folders


def _run_on(client: Client, name: str, configs: list[Any], place: Place) -> None:
    # Not pure: a run that failed for want of something is to be tried again.
    futures = [client.submit(_run, name, config, place, pure=False) for config in configs]
    try:
        said: Any = client.gather(futures, errors="skip") if futures else []
        failed: list[Any] = [future.exception() for future in futures if future.status == "error"]
    finally:
        client.cancel(futures)
    if failed:
        raise RuntimeError(f"A worker of the cluster has failed: {failed[0]}") from failed[0]
    sentences = [sentence for sentence in said if sentence is not None]
    if sentences:
        raise ValueError("\n".join(dict.fromkeys(sentences)))


# Threads of a worker share torch's generator and its number of threads.
_ONE_AT_A_TIME = threading.Lock()


def _run(name: str, config: Any, place: Place) -> str | None:
    """On a worker: a run, and what was wrong with it that can be mended."""
    import torch

    from zeromean.experiments.runs.processes import MENDABLE
    from zeromean.experiments.runs.runner import run_one

    with _ONE_AT_A_TIME:
        torch.set_num_threads(1)
        try:
            run_one(name, config, place)
        except MENDABLE as error:
            return str(error)
    return None
