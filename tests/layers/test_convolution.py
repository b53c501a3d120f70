"""Settings of convolutions that cannot be: refused when the layer is built, in a sentence."""

import pytest

import zeromean as zm


@pytest.mark.parametrize("layer", [zm.Conv1d, zm.Conv2d, zm.Conv3d, zm.ConvTranspose2d])
@pytest.mark.parametrize("name", ["stride", "dilation"])
@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("same", TypeError, "must be an integer, got 'same'"),
        ("", TypeError, "must be an integer, got ''"),
        (0, ValueError, "must be at least 1, got 0"),
        (2**40, ValueError, "must be smaller than 2³¹, got 1099511627776"),
        ((1, 1, 1, 1), ValueError, "must be one number or"),
    ],
)
def test_sizes_that_are_none_are_refused(layer, name, value, error, match):
    with pytest.raises(error, match=f"{name} {match}"):
        layer(1, 1, 3, **{name: value})


def test_padding_too_large_for_kernels_is_refused():
    with pytest.raises(ValueError, match="padding must be smaller than 2³¹"):
        zm.Conv3d(1, 1, 3, padding=2**40)
    zm.Conv2d(1, 1, 3, padding="same")
