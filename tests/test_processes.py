"""What the tests promise about the processes that they start."""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest
from _pytest.outcomes import Failed

TESTS_FOLDER = Path(__file__).parent
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]

TESTS = f"""
import os, subprocess, sys

def test_that_leaves_a_child():
    open("child", "w").write(str(subprocess.Popen({SLEEP!r}).pid))

def test_that_leaves_an_orphan():
    # Neither its parent, which has ended, nor a group leads to it.
    script = "import subprocess; p = subprocess.Popen({SLEEP!r}, start_new_session=True);"
    subprocess.run([sys.executable, "-c", script + "open('orphan', 'w').write(str(p.pid))"])

def test_that_cleans_up(processes):
    open("started", "w").write(str(processes.start({SLEEP!r}).pid))

def test_that_fails_before_it_cleans_up(processes):
    open("failed", "w").write(str(processes.start({SLEEP!r}).pid))
    assert False

def test_that_ends_its_worker():
    open("worker", "w").write(str(subprocess.Popen({SLEEP!r}).pid))
    os._exit(1)
"""


def run_tests(processes, folder, *arguments):
    (folder / "test_some.py").write_text(TESTS)
    (folder / "conftest.py").write_text("import processes; processes.GRACE = 0.2")
    command = [sys.executable, "-m", "pytest", "-p", "processes", "-p", "no:cacheprovider"]
    # Without what pytest tells itself and its workers.
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    finished = processes.run(
        [*command, "-q", "-ra", *arguments, folder / "test_some.py"],
        code=1,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(TESTS_FOLDER)},
    )
    return finished.stdout


def is_running(path):
    pid = int(path.read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are found on Linux only")


@needs_linux
def test_a_test_that_leaves_a_process_behind_fails_by_name(processes, tmp_path):
    printed = run_tests(processes, tmp_path, "-k", "not worker")
    assert "ERROR test_some.py::test_that_leaves_a_child" in printed
    assert "ERROR test_some.py::test_that_leaves_an_orphan" in printed
    assert re.search("1 failed, 3 passed, .*2 errors", printed)
    assert not any(is_running(tmp_path / n) for n in ("child", "orphan", "started", "failed"))


@needs_linux
def test_a_worker_that_dies_leaves_nothing_behind(processes, tmp_path):
    printed = run_tests(processes, tmp_path, "-k", "worker", "-n", "1")
    assert "started by test_some.py::test_that_ends_its_worker" in printed
    assert not is_running(tmp_path / "worker")


@pytest.mark.parametrize("path", sorted(TESTS_FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_processes_are_started_by_the_fixture_alone(path):
    text = path.read_text("utf-8")
    assert not re.search("^(import|from) (subprocess|multiprocessing)", text, re.MULTILINE)


def test_a_command_that_does_not_end_is_not_waited_for(processes):
    with pytest.raises(Failed, match=r"did not end within 0\.1 s"):
        processes.run(SLEEP, limit=0.1)
    with pytest.raises(Failed, match=r"did not happen within 0\.1 s"):
        processes.wait_until(lambda: False, processes.start(SLEEP), limit=0.1)
    with pytest.raises(Failed, match="ended too early"):
        processes.wait_until(lambda: False, processes.start([sys.executable, "-c", ""]))
    with pytest.raises(Failed, match="ended with code 3 instead of 0"):
        processes.run([sys.executable, "-c", "raise SystemExit(3)"])
