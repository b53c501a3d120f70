"""The command line: what it prints, and with which exit code."""

import json
import sys
from pathlib import Path

import pytest

import zeromean as zm
from zeromean import cli
from zeromean.commands import messages
from zeromean.experiments import demo
from zeromean.files.lock import locked


@pytest.fixture
def no_training(monkeypatch):
    """Fail where a command gets as far as training."""

    def run_demo(*args, **kwargs):
        pytest.fail("the demo started training")

    monkeypatch.setattr(demo, "run_demo", run_demo)


def test_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeromean {zm.__version__}\n"


def test_python_m_zeromean_is_the_same_command_line(processes):
    finished = processes.run([sys.executable, "-m", "zeromean", "--version"])
    assert finished.stdout == f"zeromean {zm.__version__}\n"


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr()
    for name in cli.COMMANDS:
        assert f"\n  {name} " in printed.out
    assert cli.main([]) == 2
    assert capsys.readouterr() == ("", printed.out)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--help"], ["--output", "--seed"]),
        (["run", "--help"], ["--quick", "--jobs"]),
        (["run", "table1", "--help"], ["--epochs", "--parameterizations", "--quick", "--jobs"]),
    ],
)
def test_help_of_a_command_names_its_options(arguments, expected, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in expected)


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--sed", "1"],
        ["demo", "--seed", "x"],
        ["run"],
        ["run", "fig2", "--points", "x"],
        ["data"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments, capsys, no_training):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert capsys.readouterr().err


def test_demo_passes_its_options_on(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(demo, "run_demo", lambda output, *, seed: calls.append((output, seed)))
    folder = tmp_path / "new" / "folder"
    assert cli.main(["demo", "--output", str(folder), "--seed", "7"]) == 0
    assert calls == [(folder, 7)]
    assert folder.is_dir()
    assert not list(folder.iterdir())


def test_folder_that_cannot_be_created_is_refused_before_training(capsys, tmp_path, no_training):
    (tmp_path / "file").write_text("in the way")
    for output in (tmp_path / "file", tmp_path / "file" / "folder"):
        assert cli.main(["demo", "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"zeromean: cannot write into {output}: ")
        assert error.count("\n") == 1


def test_folder_that_cannot_be_written_is_refused_before_training(
    capsys, monkeypatch, tmp_path, no_training
):
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(messages.tempfile, "TemporaryFile", refuse)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    assert "Permission denied; choose another --output." in capsys.readouterr().err


def test_full_disk_is_one_sentence(capsys, monkeypatch, tmp_path):
    def run_demo(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999"])
def test_seed_out_of_range_is_refused(seed, capsys, tmp_path, no_training):
    assert cli.main(["demo", "--output", str(tmp_path), "--seed", seed]) == 2
    assert f"--seed must lie between 0 and 2³² − 1, got {seed}." in capsys.readouterr().err


def test_ctrl_c_exits_with_130_and_no_traceback(capsys, monkeypatch, tmp_path):
    def run_demo(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "zeromean: interrupted.\n"


def test_missing_extra_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "tyro" else name)
    assert cli.main(["demo"]) == 2
    expected = "zeromean: the command line needs tyro; run, in a checkout of zeromean: "
    expected += "pip install '.[cli]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("verfy", "there is no command 'verfy'; did you mean verify?\n"),
        ("--quick", "there is no command '--quick'; there are demo, predict,"),
    ],
)
def test_unknown_command_is_one_sentence(name, expected, capsys):
    assert cli.main([name]) == 2
    assert capsys.readouterr().err.startswith(f"zeromean: {expected}")


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_reader_that_leaves_is_no_error(options, processes):
    # The reader is gone before anything is printed: what `| head` does now and then, always.
    code = (
        "import os, sys; from zeromean import cli; reader, writer = os.pipe(); os.close(reader)\n"
    )
    code += "os.dup2(writer, 1); sys.exit(cli.main(['list']))"
    finished = processes.run([sys.executable, *options, "-c", code], code=141)
    assert finished.stderr == ""


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["--version"]])
def test_short_answers_import_neither_torch_nor_tyro(arguments, processes, tmp_path):
    code = "import sys; from zeromean import cli; cli.main(sys.argv[1:])\n"
    code += "print([m for m in ('torch', 'numpy', 'tyro') if m in sys.modules])"
    command = [sys.executable, "-c", code, *arguments]
    assert processes.run(command, cwd=tmp_path).stdout.endswith("\n[]\n")


def test_importing_the_command_line_leaves_the_heavy_extras_alone(processes):
    code = "import sys, zeromean.cli; print([m for m in sys.argv[1:] if m in sys.modules])"
    command = [sys.executable, "-c", code, *cli.REQUIREMENTS, "zeromean.experiments.demo"]
    assert processes.run(command).stdout == "[]\n"


def test_unknown_option_names_the_nearest(capsys):
    assert cli.main(["run", "fig2", "--poinst", "3"]) == 2
    error = capsys.readouterr().err
    assert error == "zeromean: fig2 has no option --poinst; did you mean --points?\n"


def test_unknown_experiment_is_one_sentence(capsys):
    assert cli.main(["run", "tabel1"]) == 2
    error = capsys.readouterr().err
    assert error == "zeromean: there is no experiment 'tabel1'; did you mean table1?\n"


def test_run_prints_the_metrics_and_skips_what_is_finished(capsys, tmp_path):
    arguments = ["run", "fig2", "--smoke", "--points", "11", "--runs", str(tmp_path / "runs")]
    assert cli.main(arguments) == 0
    first = capsys.readouterr()
    assert "value_at_zero.ard = 0.346574" in first.out
    assert "done in" in first.err
    assert cli.main(arguments) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert again.err == "1 of 1 finished before\n"


def test_seed_and_seeds_make_runs(capsys, tmp_path):
    arguments = ["run", "fig2", "--smoke", "--runs", str(tmp_path), "--quiet"]
    assert cli.main([*arguments, "--seed", "5"]) == 0
    assert cli.main([*arguments, "--seeds", "1", "2"]) == 0
    assert {p.name for p in tmp_path.glob("fig2/*/*")} == {"seed-1", "seed-2", "seed-5"}
    assert capsys.readouterr().err == ""


def test_quick_and_smoke_together_are_refused(capsys, tmp_path):
    assert cli.main(["run", "fig2", "--quick", "--smoke", "--runs", str(tmp_path)]) == 2
    assert "choose one" in capsys.readouterr().err


def test_option_before_the_name_is_explained(capsys):
    assert cli.main(["run", "--quick", "fig2"]) == 2
    assert "the name comes first: zeromean run fig2" in capsys.readouterr().err


def test_runs_folder_that_cannot_be_written_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["run", "fig2", "--smoke", "--runs", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zeromean: cannot write into {tmp_path / 'file'}: ")


def test_folder_of_another_configuration_is_refused(capsys, tmp_path):
    arguments = ["run", "fig2", "--smoke", "--runs", str(tmp_path)]
    assert cli.main(arguments) == 0
    (path,) = tmp_path.glob("fig2/*/seed-0/config.json")
    path.write_text("{}")
    capsys.readouterr()
    assert cli.main(arguments) == 2
    assert "another configuration" in capsys.readouterr().err
    assert path.read_text() == "{}"


def test_missing_data_is_explained(capsys, monkeypatch, tmp_path):
    from zeromean import data

    def refuse(name, split="train", *, data_dir=None):
        raise ValueError(f"put train-images-idx3-ubyte.gz into {data_dir}.")

    monkeypatch.setattr(data, "load", refuse)
    arguments = ["run", "table1", "--quick", "--quiet", "--runs", str(tmp_path)]
    assert cli.main([*arguments, "--data-dir", "/nowhere"]) == 2
    expected = "zeromean: put train-images-idx3-ubyte.gz into /nowhere.\n"
    assert capsys.readouterr().err == expected


def test_list_names_every_experiment(capsys, tmp_path):
    from zeromean.experiments import registry

    assert cli.main(["list", "--runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in registry.REGISTRY)


def test_built_in_data_is_always_there(capsys):
    assert cli.main(["data", "digits"]) == 0


def test_unknown_data_set_names_the_nearest(capsys):
    assert cli.main(["data", "mnits"]) == 2
    assert "there is no data set 'mnits'; did you mean mnist?" in capsys.readouterr().err


def test_report_collects_runs_into_a_page(capsys, monkeypatch, tmp_path):
    from zeromean.experiments.runs import provenance

    monkeypatch.setattr(provenance, "commit", lambda: "1" * 40)
    monkeypatch.setattr(provenance, "commit_exists", lambda name: True)
    assert cli.main(["run", "fig2", "--smoke", "--runs", str(tmp_path / "runs"), "--quiet"]) == 0
    output = tmp_path / "page.html"
    arguments = ["report", "--collect", "--runs", str(tmp_path / "runs")]
    arguments += ["--results", str(tmp_path / "results"), "--output", str(output)]
    assert cli.main(arguments) == 0
    assert (tmp_path / "results" / "fig2.json").exists()
    assert "Figure 2" in output.read_text()


def test_report_shows_what_was_just_run_and_refuses_to_collect_it(capsys, monkeypatch, tmp_path):
    from zeromean.experiments.runs import provenance

    monkeypatch.setattr(provenance, "commit", lambda: "1" * 40 + "+")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "fig2", "--smoke", "--quiet"]) == 0
    assert cli.main(["report"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "own run, not in the records; no clean commit" in page
    assert "smoke size" in page
    assert "No claim has been measured yet" in page
    capsys.readouterr()
    assert cli.main(["report", "--collect"]) == 2
    error = capsys.readouterr().err
    assert error.count("it was made with changed files (commit 11111111+)") == 1
    assert not (tmp_path / "results").exists()


def test_verify_compares_a_fresh_seed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", "kernel_rvm"]) == 2
    assert "there is no record of kernel_rvm at full size" in capsys.readouterr().err
    run = ["run", "kernel_rvm", "--quick", "--num-train", "50", "--cancer-train", "100", "--quiet"]
    monkeypatch.setattr("zeromean.experiments.linear_models.kernel_rvm.QUICK", _small_kernel_rvm())
    assert cli.main([*run, "--seeds", "0", "1", "2", "3"]) == 0
    capsys.readouterr()
    assert cli.main(["verify", "kernel_rvm", "--quick", "--seed", "2", "--quiet"]) == 2
    assert "seed 2 is in the record" in capsys.readouterr().err
    assert cli.main(["verify", "kernel_rvm", "--quick", "--quiet"]) in (0, 1)
    printed = capsys.readouterr().out
    assert "seed 1000" in printed
    assert "sinc.rvm_error" in printed


def _small_kernel_rvm():
    from zeromean.experiments.linear_models import kernel_rvm

    return kernel_rvm.Config(num_train=50, cancer_train=100)


def test_report_without_records_is_refused(capsys, tmp_path):
    arguments = ["report", "--results", str(tmp_path / "none"), "--output", str(tmp_path / "p")]
    assert cli.main([*arguments, "--runs", str(tmp_path)]) == 2
    assert "is not a folder of records" in capsys.readouterr().err


def test_report_without_anything_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report"]) == 2
    assert "is not a folder of records" in capsys.readouterr().err


def test_damaged_files_are_named_and_the_others_shown(capsys, tmp_path):
    runs, results = tmp_path / "runs", tmp_path / "results"
    assert cli.main(["run", "fig2", "--smoke", "--runs", str(runs), "--quiet"]) == 0
    broken = runs / "fig3" / "0123456789" / "seed-0"
    broken.mkdir(parents=True)
    (broken / "done.json").write_text("{")
    capsys.readouterr()
    assert cli.main(["list", "--runs", str(runs)]) == 2
    printed = capsys.readouterr()
    assert "1 smoke" in printed.out
    assert printed.err.startswith(f"zeromean: {broken / 'config.json'} is missing")
    assert printed.err.count("\n") == 1
    arguments = ["report", "--collect", "--runs", str(runs), "--results", str(results)]
    arguments += ["--output", str(tmp_path / "p.html"), "--markdown", str(tmp_path / "p.md")]
    results.mkdir()
    (results / "fig4.json").write_text("[]")
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().err
    assert str(broken / "config.json") in printed
    assert str(results / "fig4.json") in printed
    assert "Traceback" not in printed
    assert "Figure 2" in (tmp_path / "p.html").read_text()
    assert (tmp_path / "p.md").exists()


def test_runs_that_are_not_finished_are_shown_as_such(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    started = tmp_path / "runs" / "fig2" / "0123456789" / "seed-0"
    started.mkdir(parents=True)
    (started / "config.json").write_text('{"experiment": "fig2", "config": {"seed": 0}}')
    assert cli.main(["list"]) == 0
    assert "1 interrupted" in capsys.readouterr().out
    with locked(started):
        assert cli.main(["list"]) == 0
        assert "1 running" in capsys.readouterr().out
    assert cli.main(["report"]) == 0
    page = Path("report.html").read_text("utf-8")
    assert '<span class="tally">interrupted</span>' in page
    assert f"{started.relative_to(tmp_path)}: interrupted." in page


def test_own_runs_next_to_a_record_do_not_make_it_changed_by_hand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = Path(__file__).parents[1] / "results" / "experiments"
    assert cli.main(["run", "fig2", "--smoke", "--quiet"]) == 0
    assert cli.main(["report", "--results", str(records)]) == 0
    page = Path("report.html").read_text("utf-8")
    assert "own run, not in the records" in page
    assert "changed by hand: fig2.json" not in page


def test_a_record_with_a_run_of_nothing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "fig2", "--smoke", "--quiet"]) == 0
    records = Path(__file__).parents[1] / "results" / "experiments"
    content = json.loads((records / "fig2.json").read_text("utf-8"))
    content["runs"][0]["metrics"] = None
    Path("results").mkdir()
    Path("results/fig2.json").write_text(json.dumps(content))
    assert cli.main(["report", "--results", "results"]) == 2
    assert "results/fig2.json" in capsys.readouterr().err
    assert 'id="fig2"' in Path("report.html").read_text("utf-8")
