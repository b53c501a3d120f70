"""Dawson's function integrated: the exact log-uniform KL as a function of 1 / alpha.

`tools/fit_dawson.py` derives the form used here and writes the table at the end of this file.
"""

# pyright: reportPossiblyUnboundVariable=false

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Everything a chunk touches stays in a core's second-level cache.
CHUNK_SIZE = 32_768
# The same for `kl_sum`, most of whose steps go over three rows.
SUM_CHUNK_SIZE = 65_536
# So few numbers cost more in calls than in arithmetic (one alpha for each layer).
FEW = 64
# log₂ of 1 / std, from the logarithm of the variance.
_FROM_LOG_VARIANCE = -0.5 * math.log2(math.e)


class LogUniformKL(torch.autograd.Function):
    """The KL and its derivative in 1 / alpha, each of them differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inverse_alpha: Tensor) -> tuple[Tensor, Tensor]:
        x = inverse_alpha.clamp(max=torch.finfo(inverse_alpha.dtype).max)
        y = x / (x + SCALE)
        value = torch.log1p(x / SCALE) * 0.5 + y * _polynomial(VALUE, y)
        return value, _polynomial(SLOPE, y) / (x + SCALE)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_value: Tensor | None, grad_slope: Tensor | None) -> Tensor | None:
        inverse_alpha, slope = ctx.saved_tensors
        grad = None if grad_value is None else grad_value * slope
        if grad_slope is None:
            return grad
        # Plain operations: autograd gives the derivatives beyond the second.
        curvature = _polynomial(CURVATURE, inverse_alpha / (inverse_alpha + SCALE))
        term = grad_slope * (curvature / (inverse_alpha + 5) / (inverse_alpha + 5))
        return term if grad is None else grad + term


def kl_sum(
    mean: Tensor, log_variance: Tensor, *, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum the KL over all weights and find half its gradient in `mean`, in one sweep over chunks.

    Both arguments are contiguous and share shape and dtype. With x = (mean / std)² the gradient in
    `mean` is 2 K'(x) mean / std², and the one in `log_variance` is -½ mean times that.
    """
    constants = _constants(mean.dtype, mean.device)
    half_gradient = torch.empty_like(mean) if needs_gradient else None
    outputs = mean if half_gradient is None else half_gradient
    scratch = mean.new_empty(6, min(SUM_CHUNK_SIZE, mean.numel()))
    products, logs = [], []
    for mean_chunk, log_chunk, output in zip(
        *(tensor.view(-1).split(SUM_CHUNK_SIZE) for tensor in (mean, log_variance, outputs)),
        strict=True,
    ):
        if not products or mean_chunk.numel() < scratch.shape[1]:
            scratch = scratch[:, : mean_chunk.numel()]
            inverse_std, x, y, ratio, value, slope = scratch.unbind()
            # Names for memory that is free again.
            centred, complement, polynomials = inverse_std, slope, scratch[4:]
            halves = _halves(x), _halves(y)

        # In units of SCALE: x is mean² / variance / SCALE. exp2 is faster than exp.
        torch.add(constants.log_scale, log_chunk, alpha=_FROM_LOG_VARIANCE, out=inverse_std).exp2_()
        torch.mul(mean_chunk, inverse_std, out=ratio)
        torch.mul(ratio, ratio, out=x)
        torch.add(x, constants.one, out=complement).reciprocal_()  # 1 - y
        torch.mul(x, complement, out=y)
        if needs_gradient:
            ratio.mul_(complement).mul_(inverse_std)
        torch.sub(complement, constants.half, out=centred)
        value.copy_(constants.value_first)
        if needs_gradient:
            slope.copy_(constants.slope_first)
            for coefficient in constants.slope_ahead:
                torch.addcmul(coefficient, slope, centred, out=slope)
            for pair in constants.pairs:
                torch.addcmul(pair, polynomials, centred, out=polynomials)
            torch.mul(ratio, slope, out=output)
        else:
            for coefficient, _ in constants.pairs:
                torch.addcmul(coefficient, value, centred, out=value)
        # torch.dot would lose a digit over so many terms.
        products.append(value.mul_(y).sum())
        logs.append(_sum_of_log1p_(x, *halves))
    total = torch.stack(products).sum(dtype=torch.float64)
    total += torch.stack(logs).sum(dtype=torch.float64) / 2
    return total.to(mean.dtype), half_gradient


class _Constants(NamedTuple):
    """Tensors, since wrapping a Python number costs each call more than the arithmetic."""

    log_scale: Tensor
    one: Tensor
    half: Tensor
    value_first: Tensor
    slope_first: Tensor
    slope_ahead: Sequence[Tensor]
    pairs: Sequence[Tensor]


@cache
def _constants(dtype: torch.dtype, device: torch.device) -> _Constants:
    """Numbers of `kl_sum`, with the polynomials in ½ - y."""
    place: Any = {"dtype": dtype, "device": device}
    value, slope = (
        [c if power % 2 == 0 else -c for power, c in enumerate(reversed(table[dtype]))][::-1]
        for table in (VALUE, SLOPE)
    )
    # The slope has the higher degree: its first steps run alone, the others with the value's.
    ahead = len(slope) - len(value)
    numbers = (-0.5 * math.log2(SCALE), 1, 0.5, value[0])
    pairs = [
        torch.tensor(pair, **place).unsqueeze(1) for pair in zip(value, slope[ahead:], strict=True)
    ]
    alone = torch.tensor(slope[: ahead + 1], **place).unbind()
    log_scale, one, half, value_first = torch.tensor(numbers, **place).unbind()
    return _Constants(log_scale, one, half, value_first, alone[0], alone[1:], pairs[1:])


def _halves(x: Tensor) -> tuple[Tensor, ...]:
    """Both halves, and both halves of the first of them; none where sizes are odd."""
    if len(x) % 4:
        return ()
    return *x.chunk(2), *x[: len(x) // 2].chunk(2)


def _sum_of_log1p_(x: Tensor, halves: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
    """Σ log(1 + x), by one logarithm for four numbers: (1 + a) (1 + b) = 1 + (a + b + a b).

    It overwrites x and the tensor that `others` are halves of.
    """
    if halves:
        first, second, _, _ = halves
        sums, _, one_quarter, another = others
        torch.add(first, second, out=sums).addcmul_(first, second)
        x = torch.add(one_quarter, another, out=halves[2]).addcmul_(one_quarter, another)
    return x.log1p_().sum()


def _polynomial(table: dict[torch.dtype, tuple[float, ...]], y: Tensor) -> Tensor:
    """A polynomial in y - ½: Horner's rule, or for few numbers all powers at once."""
    leading, *coefficients = table[y.dtype]
    centred = y - 0.5
    if y.numel() <= FEW and y.device.type != "mps":  # MPS has no float64.
        exponents = torch.arange(len(coefficients), -1, -1, dtype=torch.float64, device=y.device)
        weights = torch.tensor(table[y.dtype], dtype=torch.float64, device=y.device)
        return (centred.double().unsqueeze(-1).pow(exponents) @ weights).to(y.dtype)
    total = torch.full_like(y, leading)
    for coefficient in coefficients:
        total = total * centred + coefficient
    return total


# --- begin table (tools/fit_dawson.py) ---
# fmt: off
SCALE = 24.0
VALUE = {
    torch.float32: (  # highest power first
        22.857912664266017, -39.89731636304013, -23.06204086997715, 54.278152921629975,
        2.619146313272469, -37.19597541483797, 15.246986513191949, 11.699817504284276,
        -19.94433853476841, 17.178304602444005, -12.135548918642346, 7.98866511594054,
        -5.226907308137268, 3.710515051851614,
    ),
    torch.float64: (  # highest power first
        -160087904.26105836, -92230711.31380135, 404203826.9914438, 250261494.29832095,
        -463423441.74672824, -315207141.74913645, 315217140.45893437, 243849003.1294323,
        -137739962.98266593, -128900913.97965631, 37610309.181786366, 48754812.71882213,
        -4503601.498136028, -13265867.455878055, -1055428.9748119013, 2447670.553034107,
        673612.6920793322, -215255.83903674246, -162954.0050188495, -34713.913932566626,
        14619.37054468039, 18201.03987108419, 4767.962307031202, -3678.2518757867633,
        -2824.1703110063113, 257.3319053469219, 951.3213281456126, 115.16921414735688,
        -293.98811031570847, -59.24533107135869, 104.27873526916697, 8.748591578543074,
        -43.57489397247591, 14.682217885076799, 12.172528208164747, -19.916943184222383,
        17.16055771357427, -12.136146438916652, 7.9889235844747795, -5.226903484976849,
        3.7105144247814374,
    ),
}
SLOPE = {
    torch.float32: (  # highest power first
        982.3834691881318, -1264.0461942415434, -1317.1931104465941, 1774.1143875274681,
        743.1263387386446, -1220.5927135667541, -151.3477992477911, 571.6097486585511,
        -124.02868158090759, -159.59289128164522, 151.50219816258345, -77.69450637643266,
        32.22336536499085, -12.87113151046459, 5.346208044821753, -2.329519814915048,
        1.0485312666095694,
    ),
    torch.float64: (  # highest power first
        375131213460.155, 57370188715.62206, -1140742777265.9954, -200730857248.79388,
        1618805391439.5613, 326322521125.8157, -1420341910132.484, -327497160865.9186,
        859569963277.7202, 227078862387.87537, -378231827858.36755, -115142583929.09724,
        123828672458.57465, 43957014302.00558, -30123066374.377186, -12750400353.307287,
        5255569896.837353, 2771257375.288686, -584340945.1070125, -425112199.80316544,
        23989987.312640447, 36509179.25139704, 1462987.296153141, 1000187.1522143788,
        1121753.828379262, -618895.1121065497, -653975.3996944664, -51150.679543134494,
        161206.62886935094, 69996.94465501243, -21415.020498591715, -25538.504664890406,
        -163.93080437035124, 7212.2574350452805, 938.0767404189781, -2058.7269004581185,
        -198.26855740144697, 657.2463556345492, -119.56088496744574, -165.01638853735764,
        151.2818046520839, -77.50246777612423, 32.228685631819474, -12.87428625950939,
        5.346158933003793, -2.3295043750323035, 1.0485313411465065,
    ),
}
CURVATURE = {
    torch.float32: (  # highest power first
        169402.5386731949, 8563.583385900964, -265972.44415730704, -14216.124769190386,
        191943.9441346334, 9679.677581493648, -86760.06529051503, -2554.3605682792113,
        28675.404246629016, -1119.829403494711, -7469.629099759996, 1559.27839251801,
        1223.5056583200262, -680.1323197411559, 60.02367748658644, 68.53488265491237,
        -40.79047102692208, 14.78077662270371, -4.719482996631863, 1.534837939112712,
        -0.8078869881269144,
    ),
    torch.float64: (  # highest power first
        -191728556152007.66, 306369789564598.1, 797864003205987.8, -966030204396000.9,
        -1533245047259222.2, 1416299756554836.5, 1816666407109496.2, -1276592708150521.0,
        -1491488848554382.8, 786626521705732.9, 902244527713047.4, -347302289289946.3,
        -416708289695651.4, 111127338095232.83, 149950668239404.38, -24999373562170.49,
        -42424531329422.734, 3434218913492.917, 9425685896429.938, -65509829839.77228,
        -1623663993432.3794, -89319433712.75246, 211367225397.94754, 20512195316.041378,
        -20373212147.901943, -1710999546.3644528, 1713003444.4988003, -105584237.03180775,
        -248964442.38296846, 16922812.06599903, 51910238.000615835, 12153722.817011919,
        -6466925.506972068, -5262507.857067268, -437683.1101305907, 1135277.7875848417,
        455883.3513639496, -158256.9247800008, -144892.20868623492, 14915.252441481638,
        35945.976958817344, -2413.6376149026896, -8044.460252942309, 1625.3055859139229,
        1252.0293196929567, -682.3135871178399, 59.18888314678694, 68.57684635146052,
        -40.77780911381949, 14.780389368503206, -4.719558570413438, 1.5348390296389227,
        -0.807886913023133,
    ),
}
# fmt: on
# --- end table ---
