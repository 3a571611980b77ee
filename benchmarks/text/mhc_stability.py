"""Measure signal growth through 128 hyper-connections, with and without the mHC constraint.

    python -m benchmarks.text.mhc_stability [--quick] [--plot docs/images/mhc_stability.png] [--out benchmarks/results]

The maps of 64 layers come from random logits that depend on the token. Their spread is that of a lightly or a heavily
trained model. The composite gain is the gain of the product of all maps along one signal path through all layers. The
unconstrained map is I + 0.5 * logits, which plain hyper-connections start near and can reach. The script also measures
the largest difference between the logits of a Llama and its `RlmMhcForCausalLM.from_llama` version.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hrm_hf import RlmMhcForCausalLM
from hrm_hf.models.hyper_connections import (
    HyperConnection,
    backward_gain,
    composite_maps,
    forward_gain,
    min_column_sum,
)
from hrm_hf.trainer.recipes import library_versions

from ..report import make_parser, write_report


COLORS = ("#2563a8", "#c2571a", "#4d8b31", "#7a5ba6", "#1f2933")
STREAMS, WIDTH, TOKENS = 4, 64, 64
SPREADS = (0.3, 1.0)
MODES = {"sinkhorn": 1.0, "birkhoff": 1.0, "unconstrained": 0.5}  # `alpha_init` for each mixing mode


def main() -> None:
    parser = make_parser(__doc__, quick="8 layers")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--plot", type=Path, help="PNG file for a plot of the composite gain over depth")
    args = parser.parse_args()
    sites = 2 * (8 if args.quick else args.layers)
    curves = {
        f"{mode}, logit std {spread}": composite_curve(mode, spread, sites) for mode in MODES for spread in SPREADS
    }
    differences = {str(dtype).removeprefix("torch."): upcycling_difference(dtype) for dtype in DTYPES}
    report = {
        "sites": sites,
        "streams": STREAMS,
        "composite_gain": {label: curve[-1] for label, curve in curves.items()},
        "from_llama_largest_logit_difference": differences,
        "versions": library_versions(),
    }
    write_report(args, "mhc_stability", report)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        shown = ("sinkhorn, logit std 1.0", "unconstrained, logit std 0.3", "unconstrained, logit std 1.0")
        plot_composite_gain({label: curves[label] for label in shown}, args.plot)
    for label, last in report["composite_gain"].items():
        gains = f"forward {last['composite_forward']:.6g} backward {last['composite_backward']:.6g}"
        print(f"mhc composite gain over {sites} sites, {label:30} {gains}")
    for dtype, difference in differences.items():
        print(f"mhc from_llama, largest logit difference in {dtype}: {difference:.3g}")


def plot_composite_gain(curves: dict[str, list[dict]], path: Path) -> None:
    """Plot the composite gain of the signal, forward and backward, after each hyper-connection.

    Args:
        curves: label -> dicts from `composite_curve`.
        path: image to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (label, sites), color in zip(curves.items(), COLORS * len(curves)):
        depth = range(1, len(sites) + 1)
        axes.plot(depth, [site["composite_forward"] for site in sites], color=color, label=f"{label}, forward")
        axes.plot(
            depth,
            [site["composite_backward"] for site in sites],
            color=color,
            linestyle=":",
            label=f"{label}, backward",
        )
    axes.set(yscale="log", xlabel="site (two a layer)", ylabel="composite gain")
    axes.axhline(1.0, color=COLORS[-1], linewidth=0.6)
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


DTYPES = (torch.float64, torch.float32)


@torch.no_grad()
def composite_curve(mode: str, spread: float, sites: int) -> list[dict[str, float]]:
    """Return the composite gains after each hyper-connection, averaged over tokens."""
    torch.manual_seed(0)
    streams = torch.randn(1, TOKENS, STREAMS, WIDTH, dtype=torch.float64)
    maps = []
    for _ in range(sites):
        site = HyperConnection(WIDTH, STREAMS, res_mode=mode, alpha_init=MODES[mode])
        # with RMS-normed input, `spread` is the standard deviation of the logits
        site.fn.normal_(std=spread / (STREAMS * WIDTH) ** 0.5)
        maps.append(site.get_connection_matrix(streams))
    curve = []
    for product in composite_maps(maps):
        gains = {"composite_forward": forward_gain, "composite_backward": backward_gain}
        gains["composite_min_column"] = min_column_sum
        curve.append({name: gain(product).mean().item() for name, gain in gains.items()})
    return curve


@torch.no_grad()
def upcycling_difference(dtype: torch.dtype) -> float:
    """Return the largest logit difference between a small Llama and its mHC counterpart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).to(dtype).eval()
    input_ids = torch.randint(256, (2, 64))
    return (RlmMhcForCausalLM.from_llama(llama)(input_ids).logits - llama(input_ids).logits).abs().max().item()


if __name__ == "__main__":
    main()
