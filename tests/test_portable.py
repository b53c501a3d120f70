"""The runs of numerical tests as on other machines: what is skipped, and what fails."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "test_portable.py"
CI = ROOT / ".ci" / "run"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("portable_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look themselves up there.
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


TESTS = """
import os, threadpoolctl
import pytest

def test_of_threads():
    import numpy
    blas = [p for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas"]
    assert {p["num_threads"] for p in blas} == {1}
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith("OMP_NUM_THREADS=1/inductor")

@pytest.mark.skip
def test_that_is_skipped():
    pass
"""


@pytest.mark.parametrize(
    ("more", "closing"),
    [
        ("", "1 passed, 0 failed"),
        ("def test_that_fails():\n    assert 1 == 2\n", "1 passed, 1 failed"),
        ("def test_that_crashes():\n    os.abort()\n", "0 passed, 1 failed"),
    ],
    ids=["passes", "fails", "crashes"],
)
def test_a_failure_in_one_variant_is_a_failure(more, closing, processes, tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(TESTS + more)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:faulthandler\n")
    failed = "0 failed" not in closing
    command = [sys.executable, TOOL, "OMP_NUM_THREADS=1", "--tests", path]
    lines = processes.run(command, code=int(failed)).stdout.splitlines()
    assert lines[-1] == closing
    verdict, variant, *result = lines[-2].split()
    assert (verdict, variant) == ("FAILED" if failed else "passed", "OMP_NUM_THREADS=1")
    assert " ".join(result).startswith(closing)
    assert any("assert 1 == 2" in line for line in lines) == ("fails" in more)


def test_what_the_cpu_lacks_is_skipped_with_a_reason(tool):
    skylake = next(v for v in tool.VARIANTS if v.value == "SkylakeX")
    expected = "this CPU has no avx512f, avx512bw, avx512cd, avx512dq, avx512vl"
    assert tool.reason_to_skip(skylake, {"avx2", "fma"}) == expected
    assert "not known" in tool.reason_to_skip(skylake, None)


def test_a_setting_without_effect_is_skipped_with_a_reason(tool):
    unknown = tool.Variant("OPENBLAS_CORETYPE", "Unheard-of", ())
    assert "instead" in tool.reason_to_skip(unknown, set())
    assert tool.reason_to_skip(tool.Variant("OMP_NUM_THREADS", "1", ()), set()) is None


def test_numerical_tests_are_where_they_are_looked_for(tool):
    for variant in tool.VARIANTS:
        assert all((ROOT / "tests" / name).exists() for name in variant.tests)


STEPS = ["test", "docs", "test-portable"]


@pytest.mark.skipif(not CI.exists(), reason="not part of a source distribution")
@pytest.mark.parametrize("broken", [*STEPS, "nothing"])
def test_ci_fails_where_a_step_fails(broken, processes, tmp_path):
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$1"\ntest "$1" != {broken}\n')
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    finished = processes.run([CI], code=int(broken != "nothing"), env=environment)
    assert finished.stdout.split() == STEPS[: (*STEPS, "nothing").index(broken) + 1]
