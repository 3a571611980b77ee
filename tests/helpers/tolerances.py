"""Tolerances that several tests share, each with its reason.

Values are compared bit for bit only if they are copied (saved and loaded, merged into a file, kept by a step that
skips them), or if one kernel provably gets one layout: the same shapes, strides, number of threads *and alignment*. On
processors of other makers, MKL's product of small matrices sums in another order if an operand does not start at a
multiple of 64 bytes (`MKL_CBWR=COMPATIBLE` does the same on any processor). Torch allocates at such multiples, but
weights that safetensors maps from a file start wherever the file's header ends. A loaded model therefore has exactly
the saved weights, but its outputs are equal only up to rounding.

Tolerances of a single test, for example for a statistic over random maps, are in that test.
"""

import torch


# Number of products in consecutive sums between an input and an output of the tiny models: widths of 16 to 64, a few
# layers with attention, a few cycles. The largest difference seen was 11 steps of float32, in gradients.
SUMMANDS = 512


def rounding(dtype: torch.dtype, summands: int = SUMMANDS) -> float:
    """Bound the error that reordering causes in sums of `summands` products, relative to the largest value.

    A sum in any order has an error of at most `summands` times the machine epsilon (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2). Random signs leave about its square root, so functions between the sums may
    amplify an error twentyfold before it reaches the bound.
    """
    return summands * torch.finfo(dtype).eps


def assert_equal_but_for_rounding(
    found: torch.Tensor, expected: torch.Tensor, summands: int = SUMMANDS, msg: str | None = None
) -> None:
    """Assert equality up to `rounding` of the largest expected value; integers and booleans must be equal.

    For values from normalized states, the bound uses at least 1: their typical size is about 1, and a few small
    outputs do not make the sums behind them more exact.
    """
    assert found.dtype == expected.dtype, f"{msg or ''} {found.dtype}, expected {expected.dtype}"
    if not expected.is_floating_point():
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=msg)
        return
    finite = expected[expected.isfinite()].abs()
    largest = max(1.0, finite.max().item()) if finite.numel() else 1.0
    torch.testing.assert_close(
        found, expected, rtol=0, atol=rounding(expected.dtype, summands) * largest, equal_nan=True, msg=msg
    )


def differ_beyond_rounding(found: torch.Tensor, expected: torch.Tensor, summands: int = SUMMANDS) -> bool:
    """Check whether some value differs by more than reordered sums explain, unlike `not torch.equal`."""
    largest = max(1.0, expected.abs().max().item())
    return (found - expected).abs().max().item() > rounding(expected.dtype, summands) * largest


def assert_copied(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert equal names and bits, for weights that were saved, loaded or must not change."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
