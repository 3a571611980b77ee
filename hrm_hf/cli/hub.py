"""`hrm-hf push` and `hrm-hf pull`: checkpoints and Spaces to the Hub, checkpoints from it."""

import tempfile
from dataclasses import asdict
from pathlib import Path

import typer

from ..hub.options import PullOptions, PushOptions
from ..io.usage import counted
from .command import report, takes


@takes(PushOptions)
def push(options: PushOptions, as_json: bool):
    """Push a complete checkpoint in one commit: weights, code, tokenizer, card, recipe and results.

    Examples: hrm-hf push runs/sudoku_demo me/sudoku --license apache-2.0;
    hrm-hf push --space me/sudoku me/mazes me/demo
    """
    if options.space:
        _push_space(options, as_json)
        return
    folder = Path(options.sources[0]).expanduser()
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder; expected that of a saved model", param_hint="SOURCES")
    from ..hub import checkpoint_contents, push_checkpoint

    if options.dry_run:
        contents = (options.license, options.with_training_state, options.include)
        _report_plan(checkpoint_contents(folder, options.repo_id, *contents), options.repo_id, as_json)
    else:
        given = asdict(options)
        del given["sources"]
        _report_push(push_checkpoint(folder, **given), as_json)


@takes(PullOptions)
def pull(options: PullOptions, as_json: bool):
    """Pull a model at one commit, check every file against the Hub's digest, and print the commit to pin.

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


def _push_space(options: PushOptions, as_json: bool) -> None:
    from ..hub import commit_contents, space_contents

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.sources[0]).expanduser()
        if len(options.sources) > 1 or not (folder / "app.py").exists():
            from ..app.space import write_space

            folder = Path(scratch, "space")
            title = options.title or options.repo_id.split("/")[1]
            write_space(folder, options.sources, title=title, embed=options.embed)
        elif options.title or options.embed:
            raise typer.BadParameter(
                f"{folder} is a Space already", param_hint="--title" if options.title else "--embed"
            )
        contents = space_contents(folder)
        if options.dry_run:
            _report_plan(contents, options.repo_id, as_json)
        else:
            _report_push(commit_contents(contents, options), as_json)


def _report_plan(contents, repo_id: str, as_json: bool) -> None:
    sizes = contents.sizes
    if as_json:
        total = {"repository": repo_id, "bytes": sum(sizes.values())}
        report({**total, "files": sizes, "left_out": contents.left_out, "notes": contents.notes}, True)
        return
    typer.echo(f"to {repo_id}, {counted(len(sizes), 'file')}, {counted(sum(sizes.values()), 'byte')}:")
    typer.echo("\n".join(f"{size:>15,}  {name}" for name, size in sizes.items()))
    typer.echo("\n".join(f"stays behind: {name} ({why})" for name, why in contents.left_out.items()))
    typer.echo("\n".join(f"note: {note}" for note in contents.notes))


def _report_push(result, as_json: bool) -> None:
    values = {"url": result.url, "revision": result.revision, "commit": result.commit}
    values |= {"files": len(result.files), "bytes": result.bytes}
    report({**values, "notes": result.notes} if as_json else values, as_json)
    if not as_json:
        typer.echo("\n".join(f"note: {note}" for note in result.notes))
