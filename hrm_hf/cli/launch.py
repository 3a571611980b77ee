"""`hrm-hf launch`, which is also `python training/launch.py`: plan a training run for this machine, and start it."""

import json
import shlex
from typing import Annotated

import typer

from ..io.usage import counted
from ..launch.options import LaunchOptions
from .options import takes
from .report import usage_errors


CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}  # flags that are not ours are run_clm.py's
Verbose = Annotated[bool, typer.Option("--verbose", help="Show each device and each term of the memory.")]


@takes(LaunchOptions, context=typer.Context, verbose=Verbose)
def launch(options: LaunchOptions, context: typer.Context, verbose: bool, as_json: bool):
    """Plan batch, learning rate and precision for this machine's GPUs, then run training/run_clm.py on them.

    Every flag not listed here goes to run_clm.py as it is, and is not changed by the plan.

    Example: python training/launch.py --model hrm-lm-50m --gpus 4 --train_data corpus.jsonl --max_steps 20000

    Example: hrm-hf launch --model hrm-lm-100m --dry_run --gpus 8 --gpu_memory 24GB
    """
    from ..launch.run import plan_run, start

    with usage_errors():
        plan = plan_run(options, context.args)
    typer.echo(json.dumps(plan.to_dict(), indent=1) if as_json else describe(plan, verbose))
    if not options.dry_run:
        start(plan)


def describe(plan, verbose: bool = False) -> str:
    """The plan in lines of text; `verbose` adds every device and every term of the memory."""
    device, count = plan.devices[0], len(plan.devices)
    assumed = " (not all of them are here)" if plan.hypothetical else ""
    capability = f", capability {device.capability[0]}.{device.capability[1]}" if device.kind == "cuda" else ""
    used = sum(plan.memory.values())
    lines = {
        "devices": f"{count} x {device.name}, {_gib(device.memory)}{capability}{assumed}",
        "model": plan.model + (f", {counted(plan.parameters, 'parameter')}" if plan.parameters else ""),
        "memory": f"{_gib(used)} of {_gib(plan.usable_memory)} that a device can give" if plan.memory else "unknown",
        "batch": f"{plan.per_device_train_batch_size} per device x {count} x {plan.gradient_accumulation_steps} "
        f"accumulated = {counted(plan.effective_batch, 'sequence')} of {counted(plan.sequence_length, 'token')}",
        "learning rate": f"{plan.learning_rate:.6g}",
        "precision": "bf16" if plan.bf16 else "float32",
        "checkpointing": "on" if plan.activation_checkpointing else "off",
        "output": plan.output_dir,
    }
    if plan.learning_rate != plan.base_learning_rate:
        lines["learning rate"] += (
            f" = {plan.base_learning_rate:.6g} for {plan.reference_batch} sequences, scaled by {plan.lr_scaling}"
        )
    if plan.memory and not plan.fits:
        lines["memory"] += " - MORE THAN THERE IS"
    if verbose:
        lines |= {f"  device {i}": f"{item.name}, {_gib(item.memory)}" for i, item in enumerate(plan.devices)}
        lines |= {f"  {term}": _gib(size) for term, size in plan.memory.items()}
    width = max(map(len, lines))
    return (
        "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines.items()) + "\n\n" + shlex.join(plan.command)
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
