"""Fit the polynomials behind the exact log-uniform KL and write them into `zeromean/_dawson.py`.

With x = mean² / variance and Dawson's function D, the KL and its derivatives are

    K(x) = 2 ∫₀^√(x/2) D(v) dv,    K'(x) = D(z) / (2 z) at z = √(x/2),    K''(x).

All three are entire in x, and on x >= 0 each is elementary factors times a bounded function:

    K   = ½ log(1 + x / SCALE) + y Q,    K' = P / (x + SCALE),    K'' = R / (x + 5)²,

where y = x / (x + SCALE). This y maps the right half plane, on which Q, P and R are bounded, onto
the disc around ½ that has [0, 1] as its diameter. Hence a single polynomial in y - ½ serves every
x >= 0, and its monomial coefficients stay moderate: Horner's rule loses a digit in float64 (three
for K''), and there is no case distinction.

`python tools/fit_dawson.py` rewrites the table, `--check` compares it with the one in place.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import mpmath
from mpmath import mpf

SCALE = 24
NUM_NODES = 80
TOLERANCES = {"float32": mpf("2e-7"), "float64": mpf("6e-17")}
TABLE_FILE = Path(__file__).resolve().parents[1] / "src" / "zeromean" / "functional" / "_dawson.py"
BEGIN = "# --- begin table (tools/fit_dawson.py) ---\n"
END = "# --- end table ---\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    arguments = parser.parse_args()

    current = TABLE_FILE.read_text(encoding="utf-8")
    before, rest = current.split(BEGIN)
    _, after = rest.split(END)
    updated = before + BEGIN + render_table() + END + after
    if not arguments.check:
        TABLE_FILE.write_text(updated, encoding="utf-8")
        return 0
    if updated != current:
        print(f"{TABLE_FILE} differs from the fit; run tools/fit_dawson.py", file=sys.stderr)
        return 1
    return 0


def render_table() -> str:
    with mpmath.workdps(60):
        series = {
            "VALUE": chebyshev_coefficients(value_factor),
            "SLOPE": chebyshev_coefficients(slope_factor),
            "CURVATURE": chebyshev_coefficients(curvature_factor),
        }
        lines = ["# fmt: off\n", f"SCALE = {SCALE}.0\n"]
        for name, chebyshev in series.items():
            lines.append(f"{name} = {{\n")
            for dtype, tolerance in TOLERANCES.items():
                size = needed_size(chebyshev, tolerance)
                monomial = to_monomial(chebyshev[:size])
                lines.append(f"    torch.{dtype}: (  # highest power first\n")
                numbers = [repr(float(coefficient)) + "," for coefficient in reversed(monomial)]
                for start in range(0, size, 4):
                    lines.append("        " + " ".join(numbers[start : start + 4]) + "\n")
                lines.append("    ),\n")
            lines.append("}\n")
        lines.append("# fmt: on\n")
    return "".join(lines)


def value_factor(y: mpf) -> mpf:
    x = SCALE * y / (1 - y)
    return (log_uniform_kl(x) - mpmath.log1p(x / SCALE) / 2) / y


def slope_factor(y: mpf) -> mpf:
    x = SCALE * y / (1 - y)
    return dawson_ratio(x) / 2 * (x + SCALE)


def curvature_factor(y: mpf) -> mpf:
    x = SCALE * y / (1 - y)
    # D' = 1 - 2 z D, rewritten for D(z) / z as a function of x = 2 z².
    return (1 - (1 + x) * dawson_ratio(x)) / (4 * x) * (x + 5) ** 2


def log_uniform_kl(x: mpf) -> mpf:
    t = x / 2
    if t < 300:
        return t * mpmath.hyp2f2(1, 1, mpf(3) / 2, 2, -t)
    # Asymptotic series, integrated term by term from that of D.
    total, coefficient = (mpmath.log(4 * t) + mpmath.euler) / 2, mpf(1) / 2
    for order in range(1, 60):
        coefficient *= mpf(2 * order - 1) / 2
        total -= coefficient / order / t**order
    return total


def dawson_ratio(x: mpf) -> mpf:
    """D(z) / z at z = √(x / 2)."""
    z = mpmath.sqrt(x / 2)
    if z < 20:
        return mpmath.sqrt(mpmath.pi) / 2 * mpmath.exp(-z * z) * mpmath.erfi(z) / z
    return mpmath.hyp2f0(1, mpf(1) / 2, 1 / (z * z)) / (2 * z * z)


def chebyshev_coefficients(function: Callable[[mpf], mpf]) -> list[mpf]:
    """Interpolate on [0, 1] in the Chebyshev polynomials of 2 y - 1."""
    angles = [(node + mpf(1) / 2) * mpmath.pi / NUM_NODES for node in range(NUM_NODES)]
    values = [function((1 + mpmath.cos(angle)) / 2) for angle in angles]
    coefficients = [
        2 * mpmath.fdot(values, [mpmath.cos(order * angle) for angle in angles]) / NUM_NODES
        for order in range(NUM_NODES)
    ]
    coefficients[0] /= 2
    return coefficients


def needed_size(chebyshev: list[mpf], tolerance: mpf) -> int:
    """Length of the shortest truncation whose tail is below `tolerance` times the mean value."""
    tail, size = mpf(0), len(chebyshev)
    while tail + abs(chebyshev[size - 1]) < tolerance * abs(chebyshev[0]):
        size -= 1
        tail += abs(chebyshev[size])
    return size


def to_monomial(chebyshev: list[mpf]) -> list[mpf]:
    """Coefficients of the powers of y - ½, lowest first."""
    size = len(chebyshev)
    total = [mpf(0)] * size
    previous, current = [mpf(0)] * size, [mpf(1)] + [mpf(0)] * (size - 1)
    for order, coefficient in enumerate(chebyshev):
        for power in range(size):
            total[power] += coefficient * current[power]
        step = 1 if order == 0 else 2
        shifted = [mpf(0), *current[:-1]]
        following = [step * s - p for s, p in zip(shifted, previous, strict=True)]
        previous, current = current, following
    return [coefficient * 2**power for power, coefficient in enumerate(total)]


if __name__ == "__main__":
    sys.exit(main())
