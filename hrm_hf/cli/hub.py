"""`hrm-hf push` and `hrm-hf pull`: push checkpoints and Spaces to the Hub, and pull checkpoints."""

import tempfile
from pathlib import Path

import typer

from ..hub import PullOptions, PushOptions
from ..io.usage import counted
from .command import report, takes


@takes(PushOptions)
def push(options: PushOptions, as_json: bool):
    """Push a complete checkpoint in one commit: weights, code, tokenizer, card, recipe and results.

    Examples: hrm-hf push runs/sudoku_demo me/sudoku --license apache-2.0;
    hrm-hf push --space me/sudoku me/mazes me/demo
    """
    folder = Path(options.sources[0]).expanduser()
    if not (options.space or folder.is_dir()):
        raise typer.BadParameter(f"{folder}: not a folder; pass the folder of a saved model", param_hint="SOURCES")
    from ..hub import checkpoint_contents, space_contents

    with tempfile.TemporaryDirectory() as scratch:
        if not options.space:
            more = (options.license, options.with_training_state, options.include)
            contents = checkpoint_contents(folder, options.repo_id, *more)
        elif len(options.sources) > 1 or not (folder / "app.py").exists():
            from ..app.space import write_space

            title = options.title or options.repo_id.split("/")[1]
            contents = space_contents(write_space(Path(scratch, "space"), options.sources, title, options.embed))
        elif options.title or options.embed:
            hint = "--title" if options.title else "--embed"
            raise typer.BadParameter(f"not valid for {folder}, which is already a Space", param_hint=hint)
        else:
            contents = space_contents(folder)
        (_report_plan if options.dry_run else _commit)(contents, options, as_json)


def _report_plan(contents, options: PushOptions, as_json: bool) -> None:
    sizes = contents.sizes
    if as_json:
        total = {"repository": options.repo_id, "bytes": sum(sizes.values())}
        report({**total, "files": sizes, "left_out": contents.left_out, "notes": contents.notes}, True)
        return
    typer.echo(f"to {options.repo_id}, {counted(len(sizes), 'file')}, {counted(sum(sizes.values()), 'byte')}:")
    typer.echo("\n".join(f"{size:>15,}  {name}" for name, size in sizes.items()))
    for name, why in contents.left_out.items():
        typer.echo(f"not pushed: {name} ({why})")
    for note in contents.notes:
        typer.echo(f"note: {note}")


def _commit(contents, options: PushOptions, as_json: bool) -> None:
    from ..hub import commit_contents

    result = commit_contents(contents, options)
    values = {"url": result.url, "revision": result.revision, "commit": result.commit}
    values |= {"files": len(result.files), "bytes": result.bytes}
    report({**values, "notes": result.notes} if as_json else values, as_json)
    if not as_json:
        for note in result.notes:
            typer.echo(f"note: {note}")


@takes(PullOptions)
def pull(options: PullOptions, as_json: bool):
    """Pull a model at one commit, verify every file against the Hub's checksum, and print the commit to pin.

    Examples: hrm-hf pull me/sudoku --out models/sudoku;
    hrm-hf pull me/sudoku --out models/sudoku --verify
    """
    from ..hub import pull_checkpoint, verify_checkpoint

    if options.verify:
        result = verify_checkpoint(options.out, options.repo_id, revision=options.revision)
    else:
        result = pull_checkpoint(options.repo_id, options.out, revision=options.revision)
    what = {"verified" if options.verify else "path": str(result.path), "commit": result.commit}
    report({**what, "files": result.files, "bytes": result.bytes}, as_json)
