"""Run the numerical tests as other machines would: their kernels, vector units and threads.

    python tools/test_portable.py [--jobs 2] [OPENBLAS_CORETYPE=Haswell ...]

A result that depends on rounding passes on one machine and fails on the next. Each variant is a run
of pytest with one setting; two run at a time. A variant that this machine cannot show is skipped,
with the reason. Ends with code 1 where a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
# Seconds for one variant: many times what one takes on a core of its own.
LIMIT = 1800.0

# What runs on numpy and scipy, and so on OpenBLAS; and what runs on torch. About a minute each.
BLAS_TESTS = (
    "estimators/test_estimators.py",
    "estimators/test_estimators_classification.py",
    "estimators/test_estimators_input.py",
    "estimators/test_estimators_search.py",
    "estimators/test_estimators_streaming.py",
    "estimators/test_estimators_threads.py",
    "estimators/test_estimators_wide.py",
)
TORCH_TESTS = (
    "conversion/test_certificate.py",
    "compression/test_compress_random.py",
    "compression/test_compress_recurrent.py",
    "test_contract.py",
    "layers/test_dropout.py",
    "functional/test_functional.py",
    "samplers/test_fused.py",
    "samplers/test_fixed_noise.py",
    "compression/test_int8.py",
    "training/test_objective.py",
    "prediction/test_prediction.py",
    "compression/test_prune.py",
    "compression/test_quantize.py",
    "layers/test_recurrent.py",
    "samplers/test_samplers.py",
    "moments",
    "prediction/test_by_moments.py",
    "uncertainty",
    "training/test_post_hoc.py",
    "test_readme.py",
)
# These compile for a backend that calls the same kernels: no other numbers, and most of the time.
LEFT_OUT = "not graph_breaks"

# What the libraries say they run on, under the settings of a variant.
PROBE = """
import json, numpy, scipy.linalg, threadpoolctl, torch
blas = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
print(json.dumps({
    "OPENBLAS_CORETYPE": sorted({str(pool.get("architecture")) for pool in blas}),
    "ATEN_CPU_CAPABILITY": [torch.backends.cpu.get_cpu_capability().lower()],
    "OMP_NUM_THREADS": sorted({str(pool["num_threads"]) for pool in blas}
                              | {str(torch.get_num_threads())}),
}))
"""


@dataclass(frozen=True)
class Variant:
    """One setting, the tests that it concerns, and the flags of a CPU that can run it.

    Libraries take a kernel that is asked for without looking whether the CPU has its instructions.
    """

    variable: str
    value: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    along: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"

    def environment(self) -> dict[str, str]:
        ours = {variant.variable for variant in VARIANTS}
        kept = {k: v for k, v in os.environ.items() if k not in ours and "PYTEST" not in k}
        return {**kept, "OMP_NUM_THREADS": "1", **self.along, self.variable: self.value}


AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# The longest come first, so that none is left to run alone.
VARIANTS = [
    # Threads that share a core with the other run must sleep while they wait, not spin. Without the
    # contract, whose tensors are too small to be shared out among threads.
    Variant(
        "OMP_NUM_THREADS",
        "2",
        (*BLAS_TESTS, *(name for name in TORCH_TESTS if name != "test_contract.py")),
        (),
        {"OMP_WAIT_POLICY": "passive"},
    ),
    # oneDNN, which multiplies and convolves for torch, has a setting of its own.
    Variant("ATEN_CPU_CAPABILITY", "default", TORCH_TESTS, (), {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Variant(
        "ATEN_CPU_CAPABILITY", "avx2", TORCH_TESTS, ("avx2", "fma"), {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    ),
    # On torch one thread with the kernels of this machine is what `make test` is.
    Variant("OMP_NUM_THREADS", "1", BLAS_TESTS),
    Variant("OPENBLAS_CORETYPE", "Haswell", BLAS_TESTS, ("avx2", "fma")),
    Variant("OPENBLAS_CORETYPE", "Zen", BLAS_TESTS, ("avx2", "fma")),
    Variant("OPENBLAS_CORETYPE", "SkylakeX", BLAS_TESTS, AVX512),
    Variant("OPENBLAS_CORETYPE", "Sandybridge", BLAS_TESTS, ("avx",)),
]


@dataclass
class Run:
    """A variant under way."""

    variant: Variant
    process: subprocess.Popen[bytes]
    folder: Path
    started: float = field(default_factory=time.monotonic)
    cpu_seconds: float = 0.0

    def has_ended(self) -> bool:
        # Not by `poll`, which would lose the time that the process and its children have used.
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return False
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def counts(self) -> tuple[int, int]:
        """Tests that passed, and that failed; a run that broke off has failed at least once."""
        passed = failed = 0
        with suppress(OSError, ElementTree.ParseError):
            for suite in ElementTree.parse(self.folder / "result.xml").iter("testsuite"):
                number = {key: int(suite.get(key, 0)) for key in ("tests", "skipped")}
                bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
                passed += number["tests"] - number["skipped"] - bad
                failed += bad
        return passed, max(failed, int(self.process.returncode != 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", metavar="VARIABLE=VALUE", help="only these")
    parser.add_argument("--jobs", type=int, default=2, help="variants at a time (default: 2)")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="instead of the numerical tests")
    arguments = parser.parse_args()
    known = [str(variant) for variant in VARIANTS]
    if unknown := [name for name in arguments.variants if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; take some of {', '.join(known)}")
    chosen = [v for v in VARIANTS if not arguments.variants or str(v) in arguments.variants]
    passed = failed = 0
    for more_passed, more_failed in run_all(chosen, arguments.jobs, arguments.tests):
        passed, failed = passed + more_passed, failed + more_failed
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


def run_all(
    variants: list[Variant], jobs: int, tests: list[str] | None
) -> Iterator[tuple[int, int]]:
    waiting, running = list(reversed(variants)), list[Run]()
    flags = cpu_flags()
    with tempfile.TemporaryDirectory(prefix="test-portable-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    variant = waiting.pop()
                    if reason := reason_to_skip(variant, flags):
                        report("skipped", variant, reason)
                    else:
                        running.append(start(variant, Path(folder) / str(variant), tests))
                for run in running:
                    if time.monotonic() - run.started > LIMIT:
                        run.kill()
                for run in [run for run in running if run.has_ended()]:
                    running.remove(run)
                    yield finish(run)
                time.sleep(0.1)
        finally:
            for run in running:
                run.kill()
                run.process.wait()


def start(variant: Variant, folder: Path, tests: list[str] | None) -> Run:
    folder.mkdir()
    # Code that Inductor compiled for one vector unit must not be found by the next variant.
    environment = variant.environment() | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT]
    command += [f"--junitxml={folder / 'result.xml'}"]
    command += tests or [f"tests/{name}" for name in variant.tests]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(variant, process, folder)


def finish(run: Run) -> tuple[int, int]:
    passed, failed = run.counts()
    took = time.monotonic() - run.started
    if failed:
        print((run.folder / "output").read_text("utf-8", errors="replace"))
    result = f"{passed} passed, {failed} failed in {took:.0f} s ({run.cpu_seconds:.0f} s of CPU)"
    if took > LIMIT:
        result += f"; ended after {LIMIT:.0f} s"
    report("FAILED" if failed else "passed", run.variant, result)
    return passed, failed


def report(verdict: str, variant: Variant, text: str) -> None:
    print(f"{verdict:8} {variant!s:30} {text}", flush=True)


def reason_to_skip(variant: Variant, flags: set[str] | None) -> str | None:
    if variant.needs and flags is None:
        return "what this CPU can do is not known: there is no /proc/cpuinfo with its flags"
    if missing := [flag for flag in variant.needs if flag not in (flags or ())]:
        return f"this CPU has no {', '.join(missing)}"
    probe = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=variant.environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if probe.returncode:
        return None  # The tests will fail as well, and show why.
    found = json.loads(probe.stdout)[variant.variable]
    if found != [variant.value]:
        return f"the installed libraries take {' and '.join(found) or 'nothing'} instead"
    return None


def cpu_flags() -> set[str] | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return set(value.split())
    return None


if __name__ == "__main__":
    sys.exit(main())
