"""Processes that tests start: each has a time limit, and none outlives its test."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

# Seconds. Many times what anything here takes on a busy machine, and less than the time after which
# pytest itself would end (faulthandler_timeout), which leaves nobody to clean up.
LIMIT = 240.0
# A process that is about to end may still do so: a tracker of resources, a browser's helper.
GRACE = 15.0
# Started by a library when first needed; they end with the interpreter.
LASTING = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
PR_SET_CHILD_SUBREAPER = 36
CHILDREN_ARE_LISTED = Path(f"/proc/self/task/{os.getpid()}/children").exists()


class Processes:
    """Starts processes, each as leader of a group of its own, and ends what is left of them."""

    def __init__(self):
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[Any], **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        return process

    def run(
        self, command: Sequence[Any], *, code: int = 0, limit: float = LIMIT, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """What a command prints. It must end within the limit, with the given exit code."""
        finished = self.finish(self.start(command, **options), limit=limit)
        if finished.returncode != code:
            pytest.fail(
                f"{shlex.join(finished.args)} ended with code {finished.returncode} instead of "
                f"{code}.\n{finished.stdout}{finished.stderr}"
            )
        return finished

    def finish(
        self, process: subprocess.Popen[str], *, limit: float = LIMIT
    ) -> subprocess.CompletedProcess[str]:
        """Wait until the process, and all others that hold its output, have ended."""
        try:
            printed = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as late:
            said = b"".join(part for part in (late.stdout, late.stderr) if isinstance(part, bytes))
            pytest.fail(
                f"{shlex.join(map(str, late.cmd))} did not end within {limit:g} s.\n"
                + said.decode(errors="replace")
            )
        return subprocess.CompletedProcess(process.args, process.returncode, *printed)

    def wait_until(
        self, happened: Callable[[], Any], process: subprocess.Popen[str], *, limit: float = LIMIT
    ) -> None:
        """Wait for what a running process is to bring about."""
        deadline = time.monotonic() + limit
        while not happened():
            if process.poll() is not None:
                finished = self.finish(process)
                pytest.fail(f"the process ended too early.\n{finished.stdout}{finished.stderr}")
            if time.monotonic() > deadline:
                pytest.fail(f"what is waited for did not happen within {limit:g} s")
            time.sleep(0.02)

    def end(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


@pytest.fixture(autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    before = children()
    yield
    left = end_those_left(lambda: children() - before)
    if left:
        pytest.fail("processes were left behind, and have been ended:\n" + "\n".join(left))


def pytest_configure() -> None:
    # An orphan then becomes a child of this process, in which it is found, and not of the system's
    # first one. A worker's orphans, if the worker itself dies, are found by its parent in the end.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Find what outlived a fixture of a whole module, or a worker that has died."""
    if hasattr(session.config, "workerinput"):
        return
    left = end_those_left(lambda: {pid for pid in children() if is_of_a_test(pid)})
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nprocesses were left behind by tests, and have been ended:", *left, sep="\n")


def children() -> set[int]:
    """Direct children of this process; called twice a test, so that it must be cheap."""
    if not CHILDREN_ARE_LISTED:
        return {child.pid for child in psutil.Process().children()}
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # The thread has ended.
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return found


def is_of_a_test(pid: int) -> bool:
    with suppress(psutil.Error):
        return "PYTEST_CURRENT_TEST" in psutil.Process(pid).environ()
    return False


def end_those_left(find: Callable[[], set[int]]) -> list[str]:
    """Give processes some time, kill those that are still at work, and say which they were."""
    deadline = time.monotonic() + GRACE
    while (left := {pid: said for pid in find() if (said := describe(pid))}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    for pid in left:
        with suppress(psutil.Error):
            leader = psutil.Process(pid)
            for process in [leader, *leader.children(recursive=True)]:
                with suppress(psutil.Error):
                    process.kill()
    return list(left.values())


def describe(pid: int) -> str | None:
    """Command of a process and the test that started it; None where it ends by itself."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        if process.status() == psutil.STATUS_ZOMBIE or any(part in command for part in LASTING):
            return None
        test = process.environ().get("PYTEST_CURRENT_TEST", "no test")
    except psutil.Error:
        return None
    return f"  {pid}: {command[:200]} (started by {test})"
