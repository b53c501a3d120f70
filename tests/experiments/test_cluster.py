"""Runs on a Dask cluster: the same folders and numbers as here, and what workers have to say."""

import dataclasses

import pytest
import torch
from test_runner import fake, place, read  # noqa: F401

from zeromean.experiments.runs import runner

distributed = pytest.importorskip("distributed")


@pytest.fixture
def client():
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def test_seeds_and_settings_run_on_workers_as_they_do_here(fake, place, client, tmp_path):  # noqa: F811
    from zeromean.experiments.runs.cluster import run_many

    configs = [fake.Config(size=size, seed=seed) for size in (3, 4) for seed in (0, 1)]
    folders = run_many("fake", configs, place=place, client=client)
    here = dataclasses.replace(place, runs=tmp_path / "here")
    for config, folder in zip(configs, folders, strict=True):
        same = runner.run_one("fake", config, here)
        assert read(folder)["metrics"] == read(same)["metrics"]
        assert folder.relative_to(place.runs) == same.relative_to(here.runs)
    stages = len(fake.computed)
    assert run_many("fake", configs, place=place, client=client) == folders
    assert len(fake.computed) == stages  # Finished runs are skipped.


def test_the_command_lines_flag_leads_to_the_cluster(fake, place, client):  # noqa: F811
    threads = torch.get_num_threads()
    address = client.scheduler.address
    folders = runner.run_experiment("fake", fake.SMOKE, [0, 1], place=place, dask=address)
    assert [read(folder)["metrics"]["nested"]["size"] for folder in folders] == [1, 1]
    torch.set_num_threads(threads)


def test_what_runs_say_comes_back(fake, place, client, monkeypatch):  # noqa: F811
    from zeromean.experiments.runs.cluster import run_many

    def refuse(config, log):
        raise ValueError(f"size {config.size} is too small")

    monkeypatch.setattr(fake, "run", refuse)
    configs = [fake.Config(size=size) for size in (1, 2)]
    with pytest.raises(ValueError, match=r"size 1 is too small\nsize 2 is too small"):
        run_many("fake", configs, place=place, client=client)
    monkeypatch.setattr(fake, "run", lambda config, log: 1 / 0)
    with pytest.raises(RuntimeError, match="A worker of the cluster has failed: division"):
        run_many("fake", configs, place=place, client=client)
