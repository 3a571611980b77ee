"""Tolerances that several tests share, each with its reason.

To the bit only where values are copied (saved and loaded, merged into a file, kept by a step that skips them), or
where one kernel provably sees one layout: the same shapes, strides, number of threads *and alignment*. Alignment is
part of the layout: on processors that are not its maker's, MKL's product of small matrices sums in another order when
an operand does not begin at a multiple of 64 bytes (`MKL_CBWR=COMPATIBLE` does the same on any processor). Torch
allocates at such multiples; weights that safetensors maps from a file begin wherever the header of the file ends. So a
loaded model has the weights of the saved one to the bit, and its outputs but for rounding.

Tolerances of one test alone, such as that of a statistic over random maps, stay in that test.
"""

import torch


# Products that are summed, one sum after the other, between an input and an output of the tiny models: widths of 16 to
# 64, a few layers with attention, a few cycles. The largest difference seen was 11 steps of float32, in gradients.
SUMMANDS = 512


def rounding(dtype: torch.dtype, summands: int = SUMMANDS) -> float:
    """Bound the error that reordering causes in sums of `summands` products, relative to the largest value.

    The bound for one sum in any order is `summands` times the machine's epsilon (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2); random signs leave about the root of it, so functions between the sums may
    enlarge an error twentyfold before the bound is met.
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
