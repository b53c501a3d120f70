"""The experiment runner: folders, resuming, skipping, refusing; and what is kept of the runs."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from zeromean import experiments
from zeromean.experiments import records, runner
from zeromean.experiments.claims import Claim
from zeromean.experiments.figure import figure, over_seeds
from zeromean.experiments.run_log import RunLog, plain, write_json
from zeromean.report.markdown import to_markdown
from zeromean.report.page import section
from zeromean.report.records import read_record


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 10
    rate: float = 0.5
    names: tuple[str, ...] = ("a", "b")
    bold: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class OtherDefaults(Config):
    size: int = 12


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
            Claim("nested.size", 10.0, "here", 1.0, label="size"),
            Claim("nested.none", 1.0, "here", label="never measured"),
        ],
        run=run,
        figures=figures,
        computed=computed,
        interrupt_at=None,
    )
    monkeypatch.setitem(sys.modules, "fake_experiment", module)
    monkeypatch.setitem(experiments.REGISTRY, "fake", "fake_experiment")
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
    folder = runner.run_folder("fake", Config(), place.runs)
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
    assert runner.digest(Config(seed=1)) == runner.digest(Config(seed=2))
    assert runner.digest(Config(rate=0.1)) != runner.digest(Config())


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
    path = runner.run_folder("fake", Config(), place.runs) / "error.txt"
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
    folder = runner.run_folder("fake", Config(), place.runs)
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
    assert runner.command("fake", config) == expected


def test_unknown_experiment_names_the_nearest():
    with pytest.raises(ValueError, match="no experiment 'tabel1'; did you mean table1"):
        experiments.load("tabel1")


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
        Claim("metric", 1.0, "here", direction="about")


def test_jobs_run_in_processes(place):
    fig2 = experiments.load("fig2")
    folders = runner.run_experiment("fig2", fig2.SMOKE, [0, 1], place=place, jobs=2)
    assert [read(folder)["environment"]["threads"] for folder in folders] == [1, 1]


def test_jobs_report_what_went_wrong(place):
    fig5 = experiments.load("fig5")
    config = fig5.Config(sparsities=(2.0,))
    with pytest.raises(ValueError, match="sparsities must lie between 0 and 1"):
        runner.run_experiment("fig5", config, [0, 1], place=place, jobs=2)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_all_processes_and_the_run_can_go_on(jobs, tmp_path):
    command = [sys.executable, "-m", "zeromean", "run", "fig1", "--smoke", "--steps", "100000"]
    command += ["--seeds", "0", "1", "--jobs", jobs, "--runs", str(tmp_path)]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them, and their children, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line == "[fig1 seed 0] network-0\n":
                break
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()  # until the last process of the group has closed it
        # What a shell calls 130 either way: Python ends by the signal itself where it came while a
        # string was executed, as the modules that are imported meanwhile do.
        assert process.wait(timeout=30) in (130, -signal.SIGINT)
    assert rest.endswith("zeromean: interrupted.\n")
    assert "Traceback" not in rest
    (folder,) = tmp_path.glob("fig1/*/seed-0")
    assert (folder / "config.json").exists()
    assert not (folder / "done.json").exists()
    with FileLock(folder / "lock", timeout=0):
        pass


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_parent_leaves_no_process_behind(how, tmp_path):
    command = [sys.executable, "-m", "zeromean", "run", "fig1", "--smoke", "--steps", "100000"]
    command += ["--seeds", "0", "1", "--jobs", "2", "--runs", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line == "[fig1 seed 0] network-0\n":
                break
        process.send_signal(how)
        process.stderr.read()  # until the last child has closed it
    (folder,) = tmp_path.glob("fig1/*/seed-0")
    with FileLock(folder / "lock", timeout=0):
        pass


def test_seeds_that_failed_are_not_left_out_of_a_claim(fake, place, tmp_path):
    fake.CLAIMS.append(Claim("gain", 0.0, "here", label="gain", direction="at least"))
    run = fake.run
    fake.run = lambda config, log: {
        **run(config, log),
        "gain": 0.9 if config.seed == 0 else float("nan"),
    }
    runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    rows = {row.label: row for row in section("fake", "", read_record(path)).rows}
    assert rows["gain"].verdict == "not confirmed"
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
    assert "Also run: `zeromean run fake --size 7 --seeds 0`: one seed, 0" in markdown


def test_another_full_configuration_replaces_the_one_that_was(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    fake.Config = OtherDefaults
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", OtherDefaults(), [0], place=others)
    assert records.collect(others.runs, tmp_path / "results") == [path]
    (run,) = json.loads(path.read_text())["runs"]
    assert run["config"]["size"] == OtherDefaults().size


def test_a_record_without_runs_gets_the_words_of_today(fake, place, tmp_path):
    runner.run_experiment("fake", Config(), [0], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = json.loads(path.read_text())
    assert records.collect(tmp_path / "elsewhere", tmp_path / "results") == []
    fake.TITLE = "a better title"
    fake.CLAIMS[:] = [Claim("last", 1.0, "there", label="last"), Claim("unknown", 0.0, "there")]
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
    fig2 = experiments.load("fig2")
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


def test_a_record_keeps_seeds_that_the_runs_lack(fake, place, tmp_path, capsys):
    runner.run_experiment("fake", Config(), [0, 1, 2], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    before = path.read_text()
    others = runner.Place(runs=tmp_path / "others", progress=False)
    runner.run_experiment("fake", Config(), [1], place=others)
    assert records.collect(others.runs, tmp_path / "results") == []
    assert path.read_text() == before
    assert "keeps its runs: it has seeds 0, 2 too" in capsys.readouterr().err
    runner.run_experiment("fake", Config(), [0, 1, 2, 3], place=others)
    assert records.collect(others.runs, tmp_path / "results") == [path]


@pytest.mark.parametrize("content", ["[]", "null", '"x"', '{"runs": [{}]}', '{"runs'])
def test_a_damaged_record_is_named(fake, place, tmp_path, content):
    runner.run_experiment("fake", Config(), [0], place=place)
    (path,) = records.collect(place.runs, tmp_path / "results")
    path.write_text(content)
    with pytest.raises(ValueError, match=r"fake\.json is damaged .*; delete it"):
        records.collect(place.runs, tmp_path / "results")


def test_a_run_without_its_configuration_is_named(fake, place):
    (folder,) = runner.run_experiment("fake", Config(), [0], place=place)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing; move its folder away"):
        records.status("fake", place.runs)


def test_commands_quote_what_the_shell_would_split():
    linear_real = experiments.load("linear_real")
    config = dataclasses.replace(linear_real.Config(), sets=("diabetes", "breast cancer"))
    assert "--sets diabetes 'breast cancer' --seeds" in runner.command("linear_real", config)


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
    config = dataclasses.replace(experiments.load(name).SMOKE, **change)
    with pytest.raises(ValueError, match=message):
        runner.run_experiment(name, config, place=place)


def test_all_sizes_of_all_experiments_are_sensible():
    for name in experiments.REGISTRY:
        experiment = experiments.load(name)
        for config in (experiment.Config(), experiment.QUICK, experiment.SMOKE):
            runner._require_sensible(config, experiment.Config())
