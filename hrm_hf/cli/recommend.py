"""`hrm-hf recommend`: model and batch for a memory, by measured bytes."""

import json
from dataclasses import asdict

import typer

from ..launch.options import RecommendOptions
from .options import takes


@takes(RecommendOptions)
def recommend(options: RecommendOptions, as_json: bool):
    """Settings that fit into a memory: the guide's table, what was measured, and the command lines.

    Example: hrm-hf recommend --memory 4GB
    """
    from ..launch.recommend import recommend as advise

    advice = advise(options)
    typer.echo(json.dumps(asdict(advice), indent=1) if as_json else describe(advice))


def describe(advice) -> str:
    """The advice in lines of text."""
    from ..launch.memory import in_words

    lines = [
        f"memory     {in_words(advice.memory)}, of which {in_words(advice.usable)} for a step "
        f"({in_words(advice.memory - advice.usable)} kept: context, libraries, fragments)"
    ]
    lines.append(f"measured   {advice.measured_on}")
    if advice.guide:
        size = advice.guide.size(advice.guide_batch)
        read = "" if advice.guide_batch <= advice.guide.measured_batch else ", read off the line"
        share = f"{size / advice.usable:.1%} of it" if size <= advice.usable else "MORE THAN THERE IS"
        lines.append(f"guide      {advice.guide.title}, batch {advice.guide_batch}: {in_words(size)}{read}, {share}")
    best = advice.best
    size = in_words(best.size(best.largest_batch))
    lines += [f"what fits  {best.title}, batch {best.largest_batch}: {size}", ""]
    width = max(len(row.name) for row in advice.rows)
    lines.append(f"{'preset'.ljust(width)}  {'always':>10}  {'an example':>10}  largest batch here")
    for row in advice.rows:
        fits = row.largest_batch or "none"
        lines.append(f"{row.name.ljust(width)}  {in_words(row.fixed):>10}  {in_words(row.per_example):>10}  {fits}")
    for name, command in advice.commands.items():
        lines += ["", f"{name}:", f"  {command}"]
    return "\n".join(lines)
