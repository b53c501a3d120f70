"""Dawson's function integrated: the exact log-uniform KL as a function of 1 / alpha.

`tools/fit_dawson.py` derives the form used here and writes the table at the end of this file.
"""

# pyright: reportPossiblyUnboundVariable=false

import math

import torch
from torch import Tensor

# Everything a chunk touches stays in a core's second-level cache.
CHUNK_SIZE = 32_768
# So few numbers cost more in calls than in arithmetic (one alpha for each layer).
FEW = 64


class LogUniformKL(torch.autograd.Function):
    """The KL and its derivative in 1 / alpha, each of them differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inverse_alpha: Tensor) -> tuple[Tensor, Tensor]:
        x = inverse_alpha.clamp(max=torch.finfo(inverse_alpha.dtype).max)
        y = x / (x + SCALE)
        value = torch.log1p(x / SCALE) * 0.5 + y * _polynomial(VALUE, y)
        return value, _polynomial(SLOPE, y) / (x + 3)

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
    dtype = mean.dtype
    # Tensors, since wrapping a Python number costs each call more than the arithmetic.
    place = {"dtype": dtype, "device": mean.device}
    log_scale, one, half, offset = torch.tensor(
        (-0.5 * math.log(SCALE), 1, 0.5, 3 / SCALE), **place
    ).unbind()
    # The slope has the higher degree: its first steps run alone, the others with the value's.
    ahead = len(SLOPE[dtype]) - len(VALUE[dtype])
    slope_first, *slope_ahead = torch.tensor(SLOPE[dtype][: ahead + 1], **place)
    pairs = torch.tensor((VALUE[dtype], SLOPE[dtype][ahead:]), **place).T.unsqueeze(-1)
    (value_first, _), *pairs = pairs.contiguous()

    half_gradient = torch.empty_like(mean) if needs_gradient else None
    outputs = mean if half_gradient is None else half_gradient
    scratch = mean.new_empty(5, min(CHUNK_SIZE, mean.numel()))
    doubled_sums = []
    for mean_chunk, log_variance_chunk, output in zip(
        *(tensor.view(-1).split(CHUNK_SIZE) for tensor in (mean, log_variance, outputs)),
        strict=True,
    ):
        if not doubled_sums or mean_chunk.numel() < scratch.shape[1]:
            scratch = scratch[:, : mean_chunk.numel()]
            inverse_std, x, y, ratio, _ = scratch.unbind()
            # Names for memory that is free again: five rows fit the cache, seven do not.
            centred, polynomials, (value, slope) = inverse_std, scratch[3:], scratch[3:].unbind()

        # In units of SCALE: x is mean² / variance / SCALE.
        torch.add(log_scale, log_variance_chunk, alpha=-0.5, out=inverse_std).exp_()
        torch.mul(mean_chunk, inverse_std, out=ratio)
        torch.mul(ratio, ratio, out=x)
        if needs_gradient:
            ratio.div_(torch.add(x, offset, out=y))
            torch.mul(ratio, inverse_std, out=output)
        torch.div(x, torch.add(x, one, out=y), out=y)
        torch.sub(y, half, out=centred)
        value.copy_(value_first)
        if needs_gradient:
            slope.copy_(slope_first)
            for coefficient in slope_ahead:
                torch.addcmul(coefficient, slope, centred, out=slope)
            for pair in pairs:
                torch.addcmul(pair, polynomials, centred, out=polynomials)
            output.mul_(slope)
        else:
            for coefficient, _ in pairs:
                torch.addcmul(coefficient, value, centred, out=value)
        torch.addcmul(x.log1p_(), value, y, value=2, out=value)
        doubled_sums.append(value.sum())
    total = torch.stack(doubled_sums).sum(dtype=torch.float64) / 2
    return total.to(dtype), half_gradient


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
        2490.687769026463, -382.519646603828, -3596.6160789814135, 640.4988925211271,
        2406.3825682279166, -580.5697171051229, -995.025222598406, 400.33608994207486,
        236.27627023747962, -207.6885105586757, 41.04810582130968, 17.12774957876398,
        -15.438299156153773, 6.866826190160546, -2.563319006599844, 0.9688714342566919,
        -0.3928835815064319, 0.5897989170634002,
    ),
    torch.float64: (  # highest power first
        539017978923.74677, 285922619279.12646, -1585040064946.91, -888355452476.9745,
        2154889801045.759, 1291581177026.1785, -1787240490199.4573, -1165153966103.3306,
        1001742425573.3535, 728428498962.1123, -394573592124.016, -333320500809.7489,
        108338906024.56488, 114617923127.36873, -18832813445.4878, -29770957940.632103,
        1065186154.0866599, 5721727458.986327, 429120879.2750599, -756284080.7212625,
        -133311500.06281033, 52739909.76887492, 12418538.395748004, 927800.8428983224,
        2383246.017353945, 154588.398001112, -980394.8300815007, -417002.09970162093,
        115694.78476703871, 152158.47094465577, 20483.231573025118, -34401.699642283726,
        -14503.64184273302, 6218.81289789526, 4877.577964654417, -1273.724763781227,
        -1331.516366539235, 463.56461046338467, 265.08526835576436, -211.64233900145368,
        39.54986078782769, 17.28135582101497, -15.395038197523604, 6.863635190798001,
        -2.5638969545927672, 0.9688980716614104, -0.3928812874524795, 0.5897988793949099,
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
