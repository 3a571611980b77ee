"""`hrm-hf push` and `hrm-hf pull`: checkpoints and Spaces to the Hub, checkpoints from it."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..io.words import counted
from .report import AsJson, report, usage_errors


def push(
    sources: Annotated[
        list[str], typer.Argument(help="Folder of a checkpoint. With --space: a Space's folder, or models to show.")
    ],
    repo_id: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository; made if there is none.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository. [default: the owner's]")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, made if there is none, or refs/pr/N. [default: main]")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    license: Annotated[
        str | None, typer.Option(help="Of the weights, as the Hub names it: apache-2.0, mit, cc-by-4.0, other, ...")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose the commit as a pull request.")] = False,
    with_training_state: Annotated[
        bool, typer.Option("--with-training-state", help="Optimizer, carry and checkpoint-N folders too.")
    ] = False,
    include: Annotated[list[str] | None, typer.Option(help="Pattern of further files; may be repeated.")] = None,
    space: Annotated[bool, typer.Option("--space", help="Push a Gradio demo instead of a model.")] = False,
    embed: Annotated[bool, typer.Option("--embed", help="Copy models of local folders into the demo.")] = False,
    title: Annotated[str | None, typer.Option(help="Of the demo. [default: the repository's name]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and list what would go.")] = False,
    as_json: AsJson = False,
):
    """Push a complete checkpoint in one commit: weights, code, tokenizer, card, recipe and results.

    Examples: hrm-hf push runs/sudoku_demo me/sudoku --license apache-2.0;
    hrm-hf push --space me/sudoku me/mazes me/demo
    """
    if space:
        given = {
            "--license": license, "--include": include,
            "--with-training-state": with_training_state or None,
        }  # fmt: skip
        if wrong := [name for name, value in given.items() if value]:
            raise typer.BadParameter("a Space has no such thing", param_hint=wrong[0])
        _validate_target(repo_id, revision, create_pr)
        options = {"private": private, "revision": revision, "message": message, "create_pr": create_pr}
        _push_space(sources, repo_id, title, embed, dry_run, as_json, options)
        return
    if len(sources) != 1:
        raise typer.BadParameter(f"one folder makes a model, not {len(sources)}: {' '.join(sources)}")
    if title or embed:
        raise typer.BadParameter("only for a demo (--space)", param_hint="--title" if title else "--embed")
    folder = Path(sources[0]).expanduser()
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder; expected that of a saved model", param_hint="SOURCES")
    _validate_target(repo_id, revision, create_pr)
    from ..hub import checkpoint_contents, push_checkpoint

    contents = {"license": license, "with_training_state": with_training_state, "include": tuple(include or ())}
    if dry_run:
        _report_plan(checkpoint_contents(folder, repo_id, **contents), repo_id, as_json)
        return
    result = push_checkpoint(
        folder, repo_id, private=private, revision=revision, message=message, create_pr=create_pr, **contents
    )
    _report_push(result, as_json)


def pull(
    repo_id: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hub.")],
    out: Annotated[Path | None, typer.Option(help="Folder to make. [default: the cache of huggingface_hub]")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag, refs/pr/N, or sha of a commit. [default: main]")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Fetch nothing: compare --out with the Hub's digests.")
    ] = False,
    max_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Refuse a repository of more bytes in all: 500MB, 2TB, ...")
    ] = "50GB",
    max_files: Annotated[int, typer.Option(min=1, help="Refuse one of more files and folders.")] = 10_000,
    as_json: AsJson = False,
):
    """Pull a model at one commit, check every file against the Hub's digest, and print the commit to pin.

    Examples: hrm-hf pull me/sudoku --out models/sudoku;
    hrm-hf pull me/sudoku --out models/sudoku --verify
    """
    from ..hub import pull_checkpoint, verify_checkpoint

    if verify and out is None:
        raise typer.BadParameter("name the folder to compare with --out", param_hint="--verify")
    options = {"revision": revision, "max_size": _bytes(max_size), "max_files": max_files}
    if verify:
        result = verify_checkpoint(out, repo_id, **options)
    else:
        result = pull_checkpoint(repo_id, out, **options)
    what = {"verified" if verify else "path": str(result.path), "commit": result.commit}
    report({**what, "files": result.files, "bytes": result.bytes}, as_json)


def _bytes(size: str) -> int:
    """A size as people write it: 500MB, 1.5GB, 2TB, or a number of bytes."""
    from huggingface_hub.serialization._base import parse_size_to_int

    try:
        found = int(size) if size.isdecimal() else parse_size_to_int(size)
    except (ValueError, OverflowError) as error:
        said = f"{size!r} is no size; expected 500MB, 50GB, 2TB, ..."
        raise typer.BadParameter(said, param_hint="--max-size") from error
    if found < 1:
        raise typer.BadParameter(f"{size} is less than a byte", param_hint="--max-size")
    return found


def _validate_target(repo_id: str, revision: str | None, create_pr: bool) -> None:
    from ..hub import validate_push_target
    from ..io.usage import as_usage_errors

    with usage_errors():
        as_usage_errors(validate_push_target, repo_id, revision, create_pr)


def _push_space(
    sources: list[str], repo_id: str, title: str | None, embed: bool, dry_run: bool, as_json: bool, options: dict
) -> None:
    from ..hub import push_space, space_contents

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sources[0]).expanduser()
        if len(sources) > 1 or not (folder / "app.py").exists():
            from ..app.space import write_space

            folder = Path(scratch, "space")
            write_space(folder, sources, title=title or repo_id.split("/")[1], embed=embed)
        elif title or embed:
            raise typer.BadParameter(f"{folder} is a Space already", param_hint="--title" if title else "--embed")
        if dry_run:
            _report_plan(space_contents(folder), repo_id, as_json)
        else:
            _report_push(push_space(folder, repo_id, **options), as_json)


def _report_plan(contents, repo_id: str, as_json: bool) -> None:
    from ..hub.errors import printable

    sizes = contents.sizes
    if as_json:
        total = {"repository": repo_id, "bytes": sum(sizes.values())}
        report({**total, "files": sizes, "left_out": contents.left_out, "notes": contents.notes}, True)
        return
    typer.echo(f"to {repo_id}, {counted(len(sizes), 'file')}, {counted(sum(sizes.values()), 'byte')}:")
    typer.echo("\n".join(f"{size:>15,}  {printable(name)}" for name, size in sizes.items()))
    typer.echo("\n".join(f"stays behind: {printable(name)} ({why})" for name, why in contents.left_out.items()))
    typer.echo("\n".join(f"note: {printable(note)}" for note in contents.notes))


def _report_push(result, as_json: bool) -> None:
    values = {"url": result.url, "revision": result.revision, "commit": result.commit}
    values |= {"files": len(result.files), "bytes": result.bytes}
    report({**values, "notes": result.notes} if as_json else values, as_json)
    if not as_json:
        from ..hub.errors import printable

        typer.echo("\n".join(f"note: {printable(note)}" for note in result.notes))
