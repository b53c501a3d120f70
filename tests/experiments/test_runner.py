"""The experiment runner: folders, resuming, skipping, refusing; and what is kept of the runs."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from zeromean.experiments import registry
from zeromean.experiments.report.markdown import to_markdown
from zeromean.experiments.report.page import section
from zeromean.experiments.report.records import read_record
from zeromean.experiments.runs import identity, provenance, records, runner
from zeromean.experiments.runs.checksum import sealed
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import figure, over_seeds
from zeromean.experiments.runs.json_files import plain, write_json
from zeromean.experiments.runs.log import RunLog


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 10
    rate: float = 0.5
    names: tuple[str, ...] = ("a", "b")
    bold: bool = False
    seed: int = 0


COMMIT, LATER = "1" * 40, "2" * 40
COMMITS = {COMMIT, LATER}


@dataclass(frozen=True, kw_only=True)
class OtherDefaults(Config):
    size: int = 12


@dataclass(frozen=True, kw_only=True)
class OneMoreField(Config):
    depth: int = 3


@pytest.fixture
def fake(monkeypatch):
    """An experiment of three stages that counts them, and can be interrupted before one."""
    module = types.ModuleType("fake_experiment")
    computed: list[str] = []

    def stage(name):
        if module.interrupt_at == name:
            raise KeyboardInterrupt
        computed.append(name)
        return {"draw": torch.rand(()).item()}

    def run(config, log):
        draws = []
        for name in ("one", "two", "three"):
            draws.append(log.once(name, lambda name=name: stage(name))["draw"])
            log.metrics(stage=name, draw=draws[-1])
        return {"draws": draws, "last": draws[-1], "nested": {"size": config.size}, "no": None}

    def figures(found):
        draws = [record["metrics"]["draws"] for record in found]
        return [figure("Draws", "stage", "draw", [over_seeds("draws", [1, 2, 3], draws)])]

    module.__dict__.update(
        TITLE="A fake",
        SOURCE="nowhere",
        NEEDS=(),
        Config=Config,
        QUICK=Config(size=5),
        SMOKE=Config(size=1),
        CLAIMS=[
            Claim("nested.size", 10.0, PAPER("here"), 1.0, label="size"),
            Claim("nested.none", 1.0, PAPER("here"), label="never measured"),
        ],
        COVERS=(),
        run=run,
        figures=figures,
        computed=computed,
        interrupt_at=None,
    )
    monkeypatch.setitem(sys.modules, "fake_experiment", module)
    monkeypatch.setitem(registry.REGISTRY, "fake", registry.Entry("fake_experiment", "fake", ()))
    # As if it ran in a checkout without changes.
    monkeypatch.setattr(provenance, "commit", lambda: COMMIT)
    monkeypatch.setattr(provenance, "commit_exists", COMMITS.__contains__)
    return module


@pytest.fixture
def place(tmp_path):
    return runner.Place(runs=tmp_path / "runs", progress=False)


def read(folder, name="done.json"):
    return json.loads((folder / name).read_text())


def test_run_writes_config_metrics_and_what_it_depends_on(fake, place):
    (folder,) = runner.run_experiment("fake", Config(), [3], place=place)
    assert folder.parent.parent == place.runs / "fake"
    assert folder.name == "seed-3"
    assert read(folder, "config.json")["config"] == plain({**Config().__dict__, "seed": 3})
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["one", "two", "three"]
    done = read(folder)
    assert done["metrics"]["nested"] == {"size": 10}
    assert done["environment"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert done["duration"] >= 0
    assert {"commit", "finished", "resumed", "command"} <= done.keys()


def test_finished_run_is_skipped(fake, place):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    before = list(fake.computed)
    folders = runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    assert len(before) == 6
    assert len(fake.computed) == 9
    assert len(folders) == 3


def test_interrupted_run_resumes_to_the_same_numbers(fake, place, tmp_path):
    elsewhere = runner.Place(runs=tmp_path / "elsewhere", progress=False)
    (whole,) = runner.run_experiment("fake", Config(), [0], place=elsewhere)
    fake.computed.clear()
    fake.interrupt_at = "three"
    with pytest.raises(KeyboardInterrupt):
        runner.run_experiment("fake", Config(), [0], place=place)
    folder = identity.run_folder("fake", Config(), place.runs)
    assert not (folder / "done.json").exists()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    fake.interrupt_at = None
    runner.run_experiment("fake", Config(), [0], place=place)
    assert fake.computed == ["one", "two", "three"]
    assert read(folder)["resumed"]
    assert read(folder)["metrics"] == read(whole)["metrics"]
    assert (folder / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_line_cut_short_by_a_kill_is_written_again(tmp_path):
    log = RunLog(tmp_path, progress=False)
    log.metrics(a=1)
    log.metrics(a=2)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-3])
    resumed = RunLog(tmp_path, progress=False)
    for value in (1, 2, 3):
        resumed.metrics(a=value)
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n'


def test_line_that_differs_takes_the_place_of_the_earlier_one_alone(tmp_path):
    log = RunLog(tmp_path, progress=False)
    for value in (1, 2, 3):
        log.metrics(a=value)
    RunLog(tmp_path, progress=False).metrics(a=10)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"a": 10}\n{"a": 2}\n{"a": 3}\n'


def test_other_configuration_gets_another_folder(fake, place):
    folders = {
        runner.run_experiment("fake", config, place=place)[0]
        for config in (Config(), Config(size=11), Config(names=("a",)))
    }
    assert len(folders) == 3


def test_digest_ignores_the_seed_and_nothing_else():
    assert identity.digest(Config(seed=1)) == identity.digest(Config(seed=2))
    assert identity.digest(Config(rate=0.1)) != identity.digest(Config())


def test_folder_of_another_configuration_is_refused_and_left_alone(fake, place):
    (folder,) = runner.run_experiment("fake", Config(), place=place)
    (folder / "done.json").unlink()
    other = {"experiment": "fake", "config": {"size": 99}}
    (folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="holds a run of another configuration"):
        runner.run_experiment("fake", Config(), place=place)
    assert read(folder, "config.json") == other
    assert not (folder / "done.json").exists()


def test_traceback_of_a_failed_run_is_kept_until_it_succeeds(fake, place, monkeypatch):
    run = fake.run
    monkeypatch.setattr(fake, "run", lambda config, log: [][1])
    with pytest.raises(IndexError):
        runner.run_experiment("fake", Config(), place=place)
    path = identity.run_folder("fake", Config(), place.runs) / "error.txt"
    assert "IndexError" in path.read_text()
    monkeypatch.setattr(fake, "run", run)
    runner.run_experiment("fake", Config(), place=place)
    assert not path.exists()


def test_damaged_config_is_refused(fake, place):
    (folder,) = runner.run_experiment("fake", Config(), place=place)
    (folder / "config.json").write_text('{"experiment": ')
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        runner.run_experiment("fake", Config(), place=place)


def test_run_of_another_process_is_refused(fake, place):
    folder = identity.run_folder("fake", Config(), place.runs)
    folder.mkdir(parents=True)
    with (
        FileLock(folder / "lock"),
        pytest.raises(ValueError, match="is being run by another process"),
    ):
        runner.run_experiment("fake", Config(), place=place)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"jobs": 0}, "jobs must be at least 1"), ({"seeds": [-1]}, "seeds must be numbers")],
)
def test_impossible_arguments_are_refused(fake, place, arguments, message):
    with pytest.raises(ValueError, match=message):
        runner.run_experiment("fake", Config(), place=place, **arguments)


def test_global_generator_is_left_alone(fake, place):
    state = torch.get_rng_state()
    runner.run_experiment("fake", Config(), place=place)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(seed=4), "zeromean run fake --seeds 4"),
        (Config(size=1), "zeromean run fake --smoke --seeds 0"),
        (Config(size=5, bold=True), "zeromean run fake --quick --bold --seeds 0"),
        (Config(size=7, names=("x", "y")), "zeromean run fake --size 7 --names x y --seeds 0"),
    ],
)
def test_command_makes_the_run_again(fake, config, expected):
    assert identity.command("fake", config) == expected


def test_unknown_experiment_names_the_nearest():
    with pytest.raises(ValueError, match="no experiment 'tabel1'; did you mean table1"):
        registry.load("tabel1")


def test_plain_has_no_tensors_and_nothing_infinite():
    value = {"a": torch.tensor([1.0, float("inf")]), 2: (1, float("nan")), "t": torch.tensor(3)}
    assert plain(value) == {"a": [1.0, None], "2": [1, None], "t": 3}


def test_records_have_numbers_claims_and_figures(fake, place, tmp_path):
    runner.run_experiment("fake", Config(size=1), [0], place=place)
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    assert records.status("fake", place.runs) == "2 full, 1 smoke"
    (path,) = records.collect(place.runs, tmp_path / "results")
    record = json.loads(path.read_text())
    assert [(run["size"], run["seed"]) for run in record["runs"]] == [
        ("full", 0),
        ("full", 1),
        ("smoke", 0),
    ]
    assert record["runs"][0]["metrics"].keys() == {"last", "nested.size"}
    assert [claim["metric"] for claim in record["claims"]] == ["nested.size"]
    assert record["command"] == "zeromean run fake --seeds 0 1"
    (drawn,) = record["figures"]
    assert len(drawn["traces"][0]["error"]) == 3


def test_without_runs_there_is_no_record(place, tmp_path):
    assert records.collect(place.runs, tmp_path / "results") == []
    assert not (tmp_path / "results").exists()


def test_claim_direction_is_checked():
    with pytest.raises(ValueError, match="direction must be one of at least, at most, equal"):
        Claim("metric", 1.0, ours(), direction="about")


def test_claim_has_an_author():
    with pytest.raises(TypeError, match=r"author must be a document with a place.*got 'Table 1'"):
        Claim("metric", 1.0, "Table 1")
    assert Claim("metric", 1.0, PAPER("Table 1")).author.key == "paper"
    assert str(PAPER("Table 1")) == "Neklyudov et al. (2019), Table 1"
    assert (ours("half").key, str(ours("half")), str(ours())) == ("ours", "ours: half", "ours")


def test_jobs_run_in_processes(place):
    fig2 = registry.load("fig2")
    folders = runner.run_experiment("fig2", fig2.SMOKE, [0, 1], place=place, jobs=2)
    assert [read(folder)["environment"]["threads"] for folder in folders] == [1, 1]


def test_jobs_report_what_went_wrong(place):
    fig5 = registry.load("fig5")
    config = fig5.Config(sparsities=(2.0,))
    with pytest.raises(ValueError, match="sparsities must lie between 0 and 1"):
        runner.run_experiment("fig5", config, [0, 1], place=place, jobs=2)


def test_what_runs_say_comes_in_whole_lines(tmp_path, monkeypatch):
    """Several processes write to one terminal, unbuffered perhaps."""
    written = []
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(write=written.append))
    RunLog(tmp_path / "fig1" / "digest" / "seed-3", seed=3).say("network-0")
    assert written == ["[fig1 seed 3] network-0\n"]


def at_work(runs, number):
    """Whether so many runs have started."""
    return len(list(runs.glob("fig1/*/seed-*/config.json"))) == number


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_all_processes_and_the_run_can_go_on(jobs, processes, tmp_path):
    command = [sys.executable, "-m", "zeromean", "run", "fig1", "--smoke", "--steps", "100000"]
    command += ["--seeds", "0", "1", "--jobs", jobs, "--runs", str(tmp_path)]
    process = processes.start(
        command,
        # A shell that runs the tests in the background has them, and their children, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    processes.wait_until(lambda: at_work(tmp_path, int(jobs)), process)
    os.killpg(process.pid, signal.SIGINT)
    finished = processes.finish(process)
    # What a shell calls 130 either way: Python ends by the signal itself where it came while a
    # string was executed, as the modules that are imported meanwhile do.
    assert finished.returncode in (130, -signal.SIGINT)
    assert finished.stderr.endswith("zeromean: interrupted.\n")
    assert "Traceback" not in finished.stderr
    (folder,) = tmp_path.glob("fig1/*/seed-0")
    assert (folder / "config.json").exists()
    assert not (folder / "done.json").exists()
    with FileLock(folder / "lock", timeout=0):
        pass


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_parent_leaves_no_process_behind(how, processes, tmp_path):
    command = [sys.executable, "-m", "zeromean", "run", "fig1", "--smoke", "--steps", "100000"]
    command += ["--seeds", "0", "1", "--jobs", "2", "--runs", str(tmp_path)]
    process = processes.start(command)
    processes.wait_until(lambda: at_work(tmp_path, 2), process)
    process.send_signal(how)
    processes.finish(process)  # and all its children
    (folder,) = tmp_path.glob("fig1/*/seed-0")
    with FileLock(folder / "lock", timeout=0):
        pass


def test_seeds_that_failed_are_not_left_out_of_a_claim(fake, place, tmp_path):
    fake.CLAIMS.append(Claim("gain", 0.0, ours(), label="gain", direction="at least"))
    run = fake.run
    fake.run = lambda config, log: {
        **run(config, log),
        "gain": 0.9 if config.seed == 0 else float("nan"),
    }
    runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    rows = {row.label: row for row in section("fake", "", read_record(path)).rows}
    assert rows["gain"].verdict == "open"
    assert rows["size"].verdict == "confirmed"


def test_smaller_runs_do_not_replace_a_record(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = path.read_text()
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", fake.SMOKE, [0], place=others)
    assert records.collect(others.runs, tmp_path / "results") == []
    assert path.read_text() == before


def test_runs_of_other_configurations_stand_beside_those_of_a_record(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = json.loads(path.read_text())
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(size=7), [0], place=others)
    assert records.collect(others.runs, tmp_path / "results") == [path]
    after = json.loads(path.read_text())
    assert [(run["size"], run["seed"]) for run in after["runs"]] == [
        ("full", 0),
        ("full", 1),
        ("custom", 0),
    ]
    for kept in ("command", "figures", "claims"):
        assert after[kept] == before[kept]
    markdown = to_markdown([section("fake", "", read_record(path))], "")
    assert "Also run: `zeromean run fake --size 7 --seeds 0`: custom size, one seed, 0" in markdown


def test_another_full_configuration_makes_the_one_that_was_a_try(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = read(path.parent, path.name)["runs"]
    fake.Config = OtherDefaults
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", OtherDefaults(), [0], place=others)
    assert records.collect(others.runs, tmp_path / "results") == [path]
    record = read(path.parent, path.name)
    (run,) = record["runs"]
    assert run["config"]["size"] == OtherDefaults().size
    (earlier,) = record["tries"]
    assert earlier == {"command": "zeromean run fake --seeds 0", "runs": numbers_of(before)}


def numbers_of(runs):
    """Runs without what figures are drawn from, which tries do not keep."""
    return [{key: value for key, value in run.items() if key != "curves"} for run in runs]


def other_numbers(fake, change=1.0):
    """Let the fake give other numbers, as a training with other code does."""
    run = fake.run
    fake.run = lambda config, log: {**run(config, log), "last": change + config.seed}


def collected_twice(fake, place, tmp_path, first, second):
    """A record of some seeds, then of runs of other seeds with other numbers."""
    runner.run_experiment("fake", Config(), first, place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = read(path.parent, path.name)
    other_numbers(fake)
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), second, place=others)
    records.collect(others.runs, tmp_path / "results")
    return before, read(path.parent, path.name)


def test_a_new_run_of_the_same_configuration_is_shown_and_the_old_one_kept(fake, place, tmp_path):
    before, after = collected_twice(fake, place, tmp_path, [0, 1], [0, 1])
    assert [run["metrics"]["last"] for run in after["runs"]] == [1.0, 2.0]
    assert [each["runs"] for each in after["tries"]] == [numbers_of(before["runs"])]
    # Again, and nothing changes.
    others = tmp_path / "others"
    assert records.collect(others, tmp_path / "results") == []
    # The first ones again: they are shown, and the others are a try. Nothing is lost.
    records.collect(place.runs, tmp_path / "results")
    again = read(tmp_path / "results", "fake.json")
    assert again["runs"] == before["runs"]
    assert [each["runs"] for each in again["tries"]] == [
        numbers_of(after["runs"]),
        numbers_of(before["runs"]),
    ]


def test_a_run_of_fewer_seeds_does_not_take_the_place_of_more(fake, place, tmp_path, capsys):
    before, after = collected_twice(fake, place, tmp_path, [0, 1, 2], [1])
    assert after["runs"] == before["runs"]
    assert [run["metrics"]["last"] for run in after["tries"][0]["runs"]] == [2.0]
    assert "goes on to show its 3 seeds" in capsys.readouterr().err


def test_seeds_that_come_later_join_those_of_a_record(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), [2, 3], place=others)
    assert records.collect(others.runs, tmp_path / "results") == [path]
    record = read(path.parent, path.name)
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2, 3]
    assert record["command"] == "zeromean run fake --seeds 0 1 2 3"
    assert record["tries"] == []


def test_a_seed_of_another_session_joins_and_each_keeps_its_provenance(
    fake, place, tmp_path, monkeypatch
):
    runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    expected = records.record_of("fake", place.runs)
    shutil.rmtree(identity.run_folder("fake", Config(seed=2), place.runs))
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = read(path.parent, path.name)["runs"]
    # A day later, on a machine that has none of the earlier runs, at a later commit.
    monkeypatch.setattr(provenance, "commit", lambda: LATER)
    others = runner.Place(runs=tmp_path / "others", progress=False)
    (folder,) = runner.run_experiment("fake", Config(), [2], place=others)
    assert records.collect(others.runs, tmp_path / "results") == [path]
    record = read(path.parent, path.name)
    assert record["runs"][:2] == before
    assert [run["environment"]["commit"] for run in record["runs"]] == [COMMIT, COMMIT, LATER]
    assert record["runs"][2]["cpu_seconds"] == read(folder)["cpu_seconds"]
    # The figure is that of all three, and not only of those whose runs are there.
    assert record["figures"] == expected["figures"]
    assert section("fake", "", read_record(path)).rows[0].verdict == "confirmed"
    assert section("fake", "", read_record(path)).marks == []
    assert records.collect(others.runs, tmp_path / "results") == []


def test_figures_of_a_record_that_has_no_curves_say_whose_they_are(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    record = read(path.parent, path.name)
    del record["checksum"], record["drawn"]
    for run in record["runs"]:
        del run["curves"], run["version"]
    path.write_text(json.dumps(record))
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), [2], place=others)
    records.collect(others.runs, tmp_path / "results")
    after = read(path.parent, path.name)
    assert after["figures"] == record["figures"]
    assert section("fake", "", read_record(path)).drawn == "The figures show seeds 0, 1 alone."
    # Once the others are there again, all of them are drawn.
    records.collect(place.runs, tmp_path / "results")
    assert section("fake", "", read_record(path)).drawn == ""
    assert read(path.parent, path.name)["figures"] != record["figures"]


def test_a_seed_that_the_record_has_is_not_missing(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), [0, 2], place=others)
    refused = []
    assert records.collect(others.runs, tmp_path / "results", refused.append) == [path]
    assert refused == []
    runner.run_experiment("fake", Config(), [4], place=others)
    assert records.collect(others.runs, tmp_path / "results", refused.append) == []
    assert re.search(r"is not collected, seed 3 is missing; run it too", refused[0])
    assert [run["seed"] for run in read(path.parent, path.name)["runs"]] == [0, 1, 2]


def test_a_seed_that_was_started_last_is_named_until_it_is_there(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    unfinished(fake, place, 1)
    (path,) = records.collect(place.runs, tmp_path / "results")
    mark = "started and not in it: seed 1"
    assert section("fake", "", read_record(path)).marks == [mark]
    # Also where another machine knows nothing of it.
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), [0], place=others)
    assert records.collect(others.runs, tmp_path / "results") == []
    runner.run_experiment("fake", Config(), [1], place=others)
    records.collect(others.runs, tmp_path / "results")
    assert section("fake", "", read_record(path)).marks == []


def test_runs_of_another_version_are_refused_and_the_others_stay(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [2], place=place)
    fake.VERSION = 2
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), [0, 1], place=others)
    (path,) = records.collect(others.runs, tmp_path / "results")
    before, refused = path.read_text(), []
    assert records.collect(place.runs, tmp_path / "results", refused.append) == []
    (sentence,) = refused
    assert re.search(r"seed 2: it is of version 1 of the experiment, which is at 2", sentence)
    assert path.read_text() == before


def test_seeds_of_another_configuration_do_not_join_and_it_is_said(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    fake.Config = OtherDefaults
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", OtherDefaults(), [2], place=others)
    refused = []
    records.collect(others.runs, tmp_path / "results", refused.append)
    (sentence,) = refused
    assert re.search(r"seeds 0, 1 .* size = 10 where that of today has 12.*tries", sentence)
    assert [run["seed"] for run in read(path.parent, path.name)["runs"]] == [2]


def test_a_setting_that_came_later_had_its_default_before(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    fake.Config = OneMoreField
    fake.QUICK, fake.SMOKE = OneMoreField(size=5), OneMoreField(size=1)
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", OneMoreField(), [2], place=others)
    refused = []
    assert records.collect(others.runs, tmp_path / "results", refused.append) == [path]
    record = read(path.parent, path.name)
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2]
    assert {run["digest"] for run in record["runs"]} == {identity.digest(OneMoreField())}
    assert (refused, record["tries"]) == ([], [])
    # Those of the older digest are the record's, and nobody's own.
    assert not any(run.get("own") for run in own_runs(tmp_path / "results", place.runs))


def test_settings_are_not_completed_where_their_meaning_has_changed(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = read(path.parent, path.name)["runs"]
    fake.Config, fake.VERSION = OneMoreField, 2
    assert records.collect(tmp_path / "none", tmp_path / "results") == [path]
    assert read(path.parent, path.name)["runs"] == before


def test_one_clean_seed_takes_the_place_of_several_of_unknown_origin(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")

    def as_it_was(record):
        for key in ("checksum", "version", "tries", "deterministic"):
            del record[key]
        for run in record["runs"]:
            del run["version"], run["cpu_seconds"]
            run["environment"]["commit"] = "unknown"

    edit(path, as_it_was)
    for seed in (0, 1):
        others = runner.Place(runs=tmp_path / f"others-{seed}", progress=False)
        runner.run_experiment("fake", Config(), [seed], place=others)
        records.collect(others.runs, tmp_path / "results")
    record = read(path.parent, path.name)
    assert [run["seed"] for run in record["runs"]] == [0, 1]
    assert section("fake", "", read_record(path)).marks == []
    assert [len(each["runs"]) for each in record["tries"]] == [3]


def unfinished(fake, place, seed):
    """A run that has started and was interrupted."""
    fake.interrupt_at = "three"
    with pytest.raises(KeyboardInterrupt):
        runner.run_experiment("fake", Config(), [seed], place=place)
    fake.interrupt_at = None


def test_a_stale_record_makes_room_for_fewer_seeds(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    fake.VERSION = 2
    assert records.collect(tmp_path / "none", tmp_path / "results") == [path]
    assert section("fake", "", read_record(path)).marks == [
        "stale: version 1 of the experiment, which is at 2"
    ]
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), [0], place=others)
    records.collect(others.runs, tmp_path / "results")
    record = read(path.parent, path.name)
    assert [(run["version"], run["seed"]) for run in record["runs"]] == [(2, 0)]
    assert [run["version"] for run in record["tries"][0]["runs"]] == [1, 1]
    assert section("fake", "", read_record(path)).marks == []


def test_times_do_not_make_another_result(fake, place, tmp_path):
    fake.TIMINGS = ("*last",)
    before, after = collected_twice(fake, place, tmp_path, [0, 1], [0, 1])
    assert after == before


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda done: done.update(commit=None), r"seed 1: it has no commit"),
        (lambda done: done.update(commit=COMMIT + "+"), r"seed 1: it was made with changed files"),
        (lambda done: done.update(commit="3" * 40), r"seed 1: this repository has no commit 3333"),
        (lambda done: done.update(command=""), r"seed 1: it has no command"),
        (lambda done: done.pop("cpu_seconds"), r"seed 1: it has no CPU time from scratch"),
        (lambda done: done["environment"].pop("torch"), r"seed 1: its environment lacks torch"),
    ],
)
def test_runs_without_their_provenance_are_refused_and_others_collected(
    fake, place, tmp_path, change, message
):
    for size in (10, 7):
        runner.run_experiment("fake", Config(size=size), [0, 1], place=place)
    done = identity.run_folder("fake", Config(seed=1), place.runs) / "done.json"
    edit(done, lambda content: (content.pop("checksum"), change(content)))
    refused = []
    (path,) = records.collect(place.runs, tmp_path / "results", refused.append)
    (sentence,) = refused
    assert re.search(message, sentence)
    assert str(done.parent.parent) in sentence
    assert {run["size"] for run in read(path.parent, path.name)["runs"]} == {"custom"}


def test_a_missing_seed_is_refused(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    refused = []
    shutil.rmtree(identity.run_folder("fake", Config(seed=1), place.runs))
    assert records.collect(place.runs, tmp_path / "results", refused.append) == []
    # One that was started before the others and is not finished is missing, too.
    runner.run_experiment("fake", Config(), [1], place=place)
    (identity.run_folder("fake", Config(seed=0), place.runs) / "done.json").unlink()
    assert records.collect(place.runs, tmp_path / "results", refused.append) == []
    assert re.search(r"is not collected, seed 1 is missing; run it too", refused[0])
    assert re.search(r"is not collected, seed 0 is missing; run it too", refused[1])


def test_a_digest_of_something_else_is_refused(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    folder = identity.run_folder("fake", Config(), place.runs)
    folder.parent.rename(folder.parent.parent / "0123456789")
    refused = []
    assert records.collect(place.runs, tmp_path / "results", refused.append) == []
    assert "its configuration is not that of 0123456789" in refused[0]
    edit(
        folder.parent.parent / "0123456789" / "seed-0" / "config.json",
        lambda content: content.update(experiment="fig2"),
    )
    assert records.collect(place.runs, tmp_path / "results", refused.append) == []
    assert "holds a run of fig2; move it away" in refused[1]


def test_a_copy_of_a_run_is_no_other_seed(fake, place, tmp_path):
    (folder,) = runner.run_experiment("fake", Config(), [0], place=place)
    copy = folder.with_name("seed-1")
    shutil.copytree(folder, copy)
    refused = []
    records.collect(place.runs, tmp_path / "results", refused.append)
    assert re.search(r"seed-1/config\.json is that of seed 0; its folder must say so", refused[0])
    edit(copy / "config.json", lambda content: content["config"].update(seed=1))
    assert records.collect(place.runs, tmp_path / "others", refused.append) == []
    assert re.search(r"seed 1: its command is that of another seed .*--seeds 0", refused[-1])


def test_a_run_that_was_changed_by_hand_is_refused(fake, place, tmp_path):
    (folder,) = runner.run_experiment("fake", Config(), [0], place=place)
    edit(folder / "done.json", lambda done: done["metrics"].update(last=2.0))
    refused = []
    assert records.collect(place.runs, tmp_path / "results", refused.append) == []
    assert re.search(r"done\.json was changed by hand: its checksum", refused[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["runs"][0]["metrics"].update(last=2.0), "its checksum is that of"),
        (lambda record: record["runs"].pop(), "its checksum is that of something else"),
        (lambda record: record["tries"].append({"runs": []}), "its checksum is that of"),
        (lambda record: record.pop("checksum"), "it lacks its checksum"),
    ],
)
def test_a_record_that_was_changed_by_hand_is_refused(fake, place, tmp_path, change, message):
    runner.run_experiment("fake", Config(), [0, 1], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    edit(path, change)
    before = path.read_text()
    refused = []
    assert records.collect(place.runs, tmp_path / "results", refused.append) == []
    assert path.read_text() == before
    assert re.search(rf"fake\.json was changed by hand: {message}", refused[0])


def test_records_from_before_provenance_are_kept_and_marked(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")

    def as_it_was(record):
        for key in ("checksum", "version", "tries", "deterministic"):
            del record[key]
        for run, commit in zip(record["runs"], (COMMIT, COMMIT + "+", "3" * 40), strict=True):
            del run["version"], run["cpu_seconds"]
            run["environment"]["commit"] = commit

    edit(path, as_it_was)
    assert section("fake", "", read_record(path)).marks == ["no clean commit"]
    refused = []
    assert records.collect(tmp_path / "none", tmp_path / "results", refused.append) == [path]
    assert refused == []
    assert section("fake", "", read_record(path)).marks == ["its commit does not exist"]
    # A clean run, of as many seeds, takes their place.
    records.collect(place.runs, tmp_path / "results")
    assert section("fake", "", read_record(path)).marks == []
    assert len(read(path.parent, path.name)["tries"]) == 1


def test_quick_runs_stand_in_a_record_without_a_verdict(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    runner.run_experiment("fake", fake.QUICK, [0, 1, 2], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    full, quick = section("fake", "", read_record(path)).groups
    assert (full.size, [row.verdict for row in full.rows]) == ("full", ["seen once"])
    assert (quick.size, [row.verdict for row in quick.rows]) == ("quick", ["not judged"])


def test_own_runs_are_shown_and_nothing_is_written(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    results = tmp_path / "results"
    (path,) = records.collect(place.runs, results)
    before = path.read_text()
    assert [run.get("own") for run in own_runs(results, place.runs)] == [None]
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", fake.QUICK, [0], place=others)
    assert [(run["size"], run.get("own")) for run in own_runs(results, others.runs)] == [
        ("full", None),
        ("quick", True),
    ]
    assert [(run["size"], run.get("own")) for run in own_runs(None, others.runs)] == [
        ("quick", True)
    ]
    assert path.read_text() == before


def own_runs(results, runs):
    return records.with_own_runs(results, runs)["fake"]["runs"]


def test_a_record_without_runs_gets_the_words_of_today(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = json.loads(path.read_text())
    assert records.collect(tmp_path / "elsewhere", tmp_path / "results") == []
    fake.TITLE = "a better title"
    fake.CLAIMS[:] = [Claim("last", 1.0, ours(), label="last"), Claim("unknown", 0.0, ours())]
    assert records.collect(tmp_path / "elsewhere", tmp_path / "results") == [path]
    after = json.loads(path.read_text())
    assert after["title"] == "a better title"
    assert [claim["label"] for claim in after["claims"]] == ["last"]
    for kept in ("command", "runs", "figures"):
        assert after[kept] == before[kept]


def test_a_damaged_stage_is_computed_again(tmp_path):
    log = RunLog(tmp_path, progress=False)
    log.once("a", lambda: 1)
    (tmp_path / "stages" / "a.json").write_text("")
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")
    again = RunLog(tmp_path, progress=False)
    again.metrics(a=1)
    assert again.once("a", lambda: 2) == 2
    assert (tmp_path / "metrics.jsonl").read_text() == '{"a": 1}\n'


def test_a_run_of_another_version_is_named(fake, place):
    (folder,) = runner.run_experiment("fake", Config(), [0], place=place)
    (folder / "done.json").write_text("{}")
    with pytest.raises(ValueError, match=r"done\.json lacks command, commit"):
        records.status("fake", place.runs)


def test_one_run_of_several_jobs_has_one_thread_too(place):
    fig2 = registry.load("fig2")
    (folder,) = runner.run_experiment("fig2", fig2.SMOKE, [0], place=place, jobs=2)
    assert read(folder)["environment"]["threads"] == 1


def test_processes_may_write_the_same_file(tmp_path):
    def write():
        for _ in range(200):
            write_json(tmp_path / "network.json", {"a": 1})

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(write) for _ in range(4)]:
            future.result()
    assert [path.name for path in tmp_path.iterdir()] == ["network.json"]


def test_a_record_keeps_seeds_that_the_runs_lack(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = path.read_text()
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), [1], place=others)
    assert records.collect(others.runs, tmp_path / "results") == []
    assert path.read_text() == before
    runner.run_experiment("fake", Config(), [0, 1, 2, 3], place=others)
    assert records.collect(others.runs, tmp_path / "results") == [path]


@pytest.mark.parametrize("content", ["[]", "null", '"x"', '{"runs": [{}]}', '{"runs'])
def test_a_damaged_record_is_named(fake, place, tmp_path, content):
    runner.run_experiment("fake", Config(), [0], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    path.write_text(content)
    refused = []
    assert records.collect(place.runs, tmp_path / "results", refused.append) == []
    assert re.search(r"fake\.json (is damaged|lacks) .*; delete it", refused[0])


def test_a_run_without_its_configuration_is_named(fake, place):
    (folder,) = runner.run_experiment("fake", Config(), [0], place=place)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing; move its folder away"):
        records.status("fake", place.runs)


def test_commands_quote_what_the_shell_would_split():
    linear_real = registry.load("linear_real")
    config = dataclasses.replace(linear_real.Config(), sets=("diabetes", "breast cancer"))
    assert "--sets diabetes 'breast cancer' --seeds" in identity.command("linear_real", config)


def test_an_error_is_not_lost_where_it_cannot_be_written_down(fake, place, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def run(config, log):
        monkeypatch.setattr(Path, "write_text", full)
        raise ValueError("what has gone wrong")

    monkeypatch.setattr(fake, "run", run)
    with pytest.raises(ValueError, match="what has gone wrong"):
        runner.run_experiment("fake", Config(), place=place)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bandit", {"lr": math.nan}, "--lr must be a finite number, got nan"),
        ("fig1", {"steps": -1}, "--steps must not be negative, got -1"),
        ("table1", {"parameterizations": ()}, "--parameterizations needs at least one value"),
    ],
)
def test_options_that_mean_nothing_are_refused(place, name, change, message):
    config = dataclasses.replace(registry.load(name).SMOKE, **change)
    with pytest.raises(ValueError, match=message):
        runner.run_experiment(name, config, place=place)


def test_all_sizes_of_all_experiments_are_sensible():
    for name in registry.REGISTRY:
        experiment = registry.load(name)
        for config in (experiment.Config(), experiment.QUICK, experiment.SMOKE):
            runner._require_sensible(config, experiment.Config())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"experiment": "fake", "config": []}'),
        ("config.json", '{"experiment": "fake", "config": {"seed": "x"}}'),
        ("config.json", "[" * 100_000),
        ("done.json", "\x00"),
        ("done.json", "null"),
        ("done.json", {"metrics": None}),
        ("done.json", {"metrics": {"last": 10**400}}),
        ("done.json", {"metrics": {"draws": "text"}}),
        ("done.json", {"duration": "long"}),
        ("done.json", {"environment": 3}),
    ],
)
def test_damaged_runs_are_named_and_the_others_collected(fake, place, tmp_path, name, content):
    runner.run_experiment("fake", fake.QUICK, [0], place=place)
    (damaged,) = runner.run_experiment("fake", Config(), [0], place=place)
    path = damaged / name
    if isinstance(content, dict):
        content = json.dumps(sealed({**json.loads(path.read_text()), **content}))
    path.write_text(content)
    sentences = []
    collected = records.collect(place.runs, tmp_path / "results", sentences.append)
    assert len(sentences) == 1
    # Text where a curve belongs shows itself only where all runs are drawn.
    drawn = "text" in content
    assert str(place.runs / "fake" if drawn else damaged) in sentences[0]
    assert len(sentences[0]) < 400
    assert [len(read_record(record).runs) for record in collected] == ([] if drawn else [1])
    sentences.clear()
    records.status("fake", place.runs, sentences.append)
    assert len(sentences) == (0 if drawn else 1)


def test_null_metrics_are_gaps_in_figures(fake, place, tmp_path):
    run = fake.run
    fake.run = lambda config, log: {**run(config, log), "other": 1.0, "lost": float("nan")}
    draw = fake.figures

    def figures(found):
        lost = [1 - record["metrics"]["lost"] for record in found]
        return [*draw(found), figure("Lost", "seed", "x", [over_seeds("lost", [1], [lost])])]

    fake.figures = figures
    (folder,) = runner.run_experiment("fake", Config(), [0], place=place)
    done = read(folder)
    done["metrics"]["draws"][1] = None
    (folder / "done.json").write_text(json.dumps(sealed(done)))
    assert done["metrics"]["lost"] is None
    (path,) = records.collect(place.runs, tmp_path / "results")
    drawn, lost = read_record(path).figures
    assert drawn.traces[0].y[1] is None
    assert lost.traces[0].y == [None]


@pytest.mark.parametrize("content", ["{", '{"runs": 3}', '{"runs": [{"digest": []}]}'])
def test_damaged_records_are_named_kept_and_leave_the_others(fake, place, tmp_path, content):
    fig2 = registry.load("fig2")
    runner.run_experiment("fake", Config(), [0], place=place)
    runner.run_experiment("fig2", fig2.SMOKE, [0], place=place)
    results = tmp_path / "results"
    results.mkdir()
    (results / "fig2.json").write_text(content)
    sentences = []
    assert records.collect(place.runs, results, sentences.append) == [results / "fake.json"]
    assert len(sentences) == 1
    assert str(results / "fig2.json") in sentences[0]
    assert (results / "fig2.json").read_text() == content
