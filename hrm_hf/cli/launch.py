"""`hrm-hf launch`, which is also `python training/launch.py`: plan a training run for this machine, and start it."""

import json
import shlex
from typing import Annotated, Literal

import typer

from ..io.words import counted
from .report import call


# What is no option of the launcher belongs to run_clm.py. Both spellings of an option are taken, as the guide's
# launcher has underscores and our other commands have dashes.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


BatchTable = Literal["memory", "guide"]  # where the batch per device comes from
Scaling = Literal["sqrt", "linear", "none"]  # how the learning rate grows with the batch
Strategy = Literal["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"]  # what is kept in shards
Launcher = Literal["accelerate", "torchrun"]  # which program starts the processes


def launch(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="hrm-lm-50m, rlm-mhc-small, gpt2, ...: a recipe, preset or model type.")],
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to use; all by default.")] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu_memory", "--gpu-memory", help="With --dry_run: plan for GPUs of this size, e.g. 24GB."),
    ] = None,
    gpu_capability: Annotated[
        str | None,
        typer.Option("--gpu_capability", "--gpu-capability", help="With --dry_run: compute capability, e.g. 7.5."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="With --cpu: processes. [default: 1]")] = None,
    batch_table: Annotated[
        BatchTable,
        typer.Option("--batch_table", "--batch-table", help="Batch per device: what fits, or the guide's table."),
    ] = "memory",
    effective_batch: Annotated[
        int | None,
        typer.Option("--effective_batch", "--effective-batch", min=1, help="Sequences a step; the recipe's, or 16."),
    ] = None,
    lr_scaling: Annotated[
        Scaling, typer.Option("--lr_scaling", "--lr-scaling", help="Growth of the learning rate with a larger batch.")
    ] = "sqrt",
    strategy: Annotated[Strategy, typer.Option(help="ddp, or what keeps large models in shards.")] = "ddp",
    launcher: Annotated[Launcher, typer.Option(help="Who starts GPU processes; the CPU's always torchrun.")] = (
        "accelerate"
    ),
    port: Annotated[
        int | None,
        typer.Option("--master_port", "--master-port", min=1, max=65535, help="Port of the processes; a free one."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry_run", "--dry-run", help="Print the plan and stop.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show each device and each term of the memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
):
    """Plan batch, learning rate and precision for this machine's GPUs, then run training/run_clm.py on them.

    Every flag not listed here goes to run_clm.py as it is, and is not changed by the plan.

    Example: python training/launch.py --model hrm-lm-50m --gpus 4 --train_data corpus.jsonl --max_steps 20000

    Example: hrm-hf launch --model hrm-lm-100m --dry_run --gpus 8 --gpu_memory 24GB
    """
    options = dict(locals())
    for name in ("context", "verbose", "as_json"):
        del options[name]
    from ..launch.run import plan_run, start

    plan = call(plan_run, options | {"arguments": context.args})
    typer.echo(json.dumps(plan.to_dict(), indent=1) if as_json else describe(plan, verbose))
    if not dry_run:
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
