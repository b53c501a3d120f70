"""Build the package, check it, and use it where the checkout is not.

    python tools/package.py [--dist dist]

Builds wheel and sdist twice, the second wheel from the sdist: they must be the same byte for byte.
Checks metadata, installs the wheel into a fresh virtual environment, first without extras, and runs
there what a user would. Most of the time is that of torch being installed; packages come from the
index, held to the constraints of this checkout. Ends with code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from zeromean.extras import Extra

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ("--constraint", ROOT / "constraints.txt")
EXTRAS = get_args(Extra)
# They would replace torch, or bring gigabytes that a CPU has no use for.
UNWANTED = re.compile(r"torch|torchvision|torchaudio|nvidia-.*|triton")
# For one command; installing torch is the longest.
LIMIT = 900.0
IN_WHEEL = ("zeromean/__init__.py", "zeromean/py.typed", "zeromean/commands/predict.py")
IN_SDIST = ("LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/cases.py")

CORE = """
import sys
import torch
import zeromean as zm
assert sys.prefix in zm.__file__, zm.__file__
layers = zm.Linear(4, 9, posterior=zm.Additive), torch.nn.ReLU(), zm.Linear(9, 3)
model = torch.nn.Sequential(*layers)
x, y = torch.randn(60, 4), torch.randint(3, (60,))
optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=1e-2))
for _ in range(3):
    nll = torch.nn.functional.cross_entropy(model(x), y)
    loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=len(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert zm.predict_proba(model, x).shape == (60, 3)
"""
FILES = """
import numpy
import torch
import zeromean as zm
from zeromean import export
model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU(), zm.Linear(9, 3, prior=None))
export.save_compressed(model, "model.safetensors")
numpy.savez("data.npz", numpy.random.default_rng(0).normal(size=(30, 4)))
"""


class CheckError(Exception):
    """What is wrong with the package, in a sentence."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder for the files")
    dist = parser.parse_args().dist.resolve()
    with tempfile.TemporaryDirectory(prefix="zeromean-package-") as folder:
        place = Path(folder)
        try:
            wheel, sdist = step("built twice, the same both times", lambda: build(place))
            step("contents and metadata", lambda: check_contents(wheel, sdist))
            step("twine check", lambda: run(sys.executable, "-m", "twine", "check", "--strict",
                                            wheel, sdist))  # fmt: skip
            python = step("fresh environment with torch", lambda: environment(place))
            step("core alone: import, train, predict", lambda: check_core(python, wheel, place))
            step("extras bring no other torch", lambda: check_extras(python, wheel))
            step("command line", lambda: check_command_line(python, wheel, place))
        except CheckError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        dist.mkdir(parents=True, exist_ok=True)
        for path in (wheel, sdist):
            shutil.copy2(path, dist / path.name)
            print(f"wrote {dist / path.name}: {path.stat().st_size:,} bytes")
    return 0


def step(name: str, work: Callable[[], Any]) -> Any:
    start = time.monotonic()
    result = work()
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return result


def run(*command: Any, code: int = 0, cwd: Path = ROOT, **environ: str) -> str:
    """What a command prints. Nothing of this checkout is on its path."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, "PYTHONNOUSERSITE": "1", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if finished.returncode != code:
        shown = " ".join(str(part) for part in command[:6])
        raise CheckError(
            f"{shown} ended with code {finished.returncode} instead of {code}\n"
            f"{finished.stdout}{finished.stderr}"
        )
    return finished.stdout + finished.stderr


def build(place: Path) -> tuple[Path, Path]:
    """Wheel and sdist, the same whether the wheel is built from the checkout or from the sdist."""
    epoch = {"SOURCE_DATE_EPOCH": str(1_700_000_000)}
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*command, place / "first", "--wheel", "--sdist", ROOT, **epoch)
    run(*command, place / "second", ROOT, **epoch)
    first, second = (sorted((place / name).iterdir()) for name in ("first", "second"))
    if [path.name for path in first] != [path.name for path in second] or len(first) != 2:
        raise CheckError(f"two builds wrote {first} and {second}")
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            raise CheckError(f"{one.name} is another one when it is built again")
    wheel, sdist = sorted(first, key=lambda path: path.suffix != ".whl")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(metadata))
    missing = [name for name in IN_WHEEL if name not in names]
    foreign = [n for n in names if not n.startswith(("zeromean/", metadata.partition("/")[0]))]
    if missing or foreign:
        raise CheckError(f"the wheel lacks {missing}, and has {foreign}")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in IN_SDIST if name not in inside]
    if missing:
        raise CheckError(f"the sdist lacks {missing}")
    for field in ("Author", "License-Expression", "License-File", "Classifier", "Keywords"):
        if not message[field]:
            raise CheckError(f"the metadata have no {field}")
    description = message.get_payload(decode=True).decode("utf-8")
    relative = re.findall(r"\]\((?!https?:|#)[^)]*\)", description)
    if relative or len(description) < 1000:
        raise CheckError(f"the description leads nowhere: {relative}")


def environment(place: Path) -> Path:
    """A virtual environment with torch alone, as the README asks for."""
    run(sys.executable, "-m", "venv", place / "venv")
    python = place / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    install(python, "torch")
    return python


def install(python: Path, *what: Any) -> None:
    run(python, "-m", "pip", "install", "--quiet", *CONSTRAINTS, *what)


def check_core(python: Path, wheel: Path, place: Path) -> None:
    install(python, wheel)
    away = place / "core"
    away.mkdir()
    run(python, "-c", CORE, cwd=away)
    printed = run(python, "-m", "zeromean", "doctor", cwd=away)
    expect(printed, "doctor", "missing safetensors", "pip install 'safetensors>=")
    expect(run(python, "-m", "zeromean", "list", code=2, cwd=away), "needs", "tyro")


def check_extras(python: Path, wheel: Path) -> None:
    """What all extras together would bring next to the torch that is there: no extra brings more.

    One resolution for all of them: each would take as long.
    """
    command = ("install", "--dry-run", "--quiet", "--report", "-", *CONSTRAINTS)
    printed = run(python, "-m", "pip", *command, f"{wheel}[{','.join(EXTRAS)}]")
    report = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    names = [each["metadata"]["name"].lower() for each in report["install"]]
    unwanted = [name for name in names if UNWANTED.fullmatch(name.replace("_", "-"))]
    if unwanted or "lightning" not in names:
        raise CheckError(f"the extras would install {', '.join(unwanted or names)}")


def check_command_line(python: Path, wheel: Path, place: Path) -> None:
    install(python, f"{wheel}[io,cli]")
    away = place / "away"
    away.mkdir()
    readme = (ROOT / "README.md").read_text("utf-8")
    example = re.search(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert example is not None
    expect(run(python, "-c", example[1], cwd=away), "accuracy 0.9")
    zeromean = python.with_name("zeromean")
    expect(run(zeromean, "--help", cwd=away), "predict", "inspect", "doctor")
    expect(run(zeromean, "doctor", cwd=away), "cli", "installed: matplotlib")
    run(python, "-c", FILES, cwd=away)
    predicted = run(
        zeromean, "predict", "model.safetensors", "data.npz", "--out", "p.csv", cwd=away
    )
    expect(predicted, "30 rows, 20 samples", "wrote p.csv")
    if len((away / "p.csv").read_text().splitlines()) != 31:
        raise CheckError("zeromean predict did not write a line for each row")
    inspected = run(zeromean, "inspect", "model.safetensors", "--pictures", "pictures", cwd=away)
    expect(inspected, "ZeroMean", "checksum", "scale.png")


def expect(printed: str, *words: str) -> None:
    absent = [word for word in words if word not in printed]
    if absent:
        raise CheckError(f"{absent} not found in what was printed:\n{printed}")


if __name__ == "__main__":
    sys.exit(main())
