"""README and docs as data: code blocks, links, and commands, checked against the real options.

Runs nothing and builds no model. The program's own parser checks a command: Typer's for `hrm-hf`, HfArgumentParser's
for the training scripts, argparse's for `accelerate launch` and `torchrun`. `...` and words in capitals are
placeholders.
"""

import functools
import importlib.util
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import typer
import yaml
from transformers import HfArgumentParser

from hrm_hf.cli import app
from hrm_hf.puzzles.pretrain_options import parse_command
from hrm_hf.trainer.recipes import ModelArguments, build_config


ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
SHELLS = ("bash", "sh", "console")
FENCE = re.compile(r"^ *(`{3,}|~{3,})\s*([\w+-]*)")
NOT_EXECUTED = re.compile(r"^\s*<!-- not executed:(.*?)-->\s*$")
LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
CODE_SPAN = re.compile(r"(`+)(.+?)\1")
SCRIPT = re.compile(r"^(\./)?training/\w+\.py$")
OWN_FILE = re.compile(r"^(\./)?(training|accelerate_configs|benchmarks|tests|docs)/\S*\.\w+$")
OPERATORS = set("();<>|&")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is where its code starts, `reason` says why it is not executed (None if it is)."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None = None


@dataclass(frozen=True)
class Command:
    """A one-line shell command, or one mentioned in a sentence or table."""

    page: str
    words: tuple[str, ...]
    mention: bool = False


class CommandError(AssertionError):
    """Raised for a command that the program would reject, or a file that does not exist."""


def blocks(page: str, *languages: str) -> list[Block]:
    """Return the fenced blocks of a page in order, only of the given languages if any."""
    found, start, fence, language, lines = [], 0, None, "", (ROOT / page).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        mark = FENCE.match(line)
        if fence is None and mark:
            fence, language, start = mark.group(1), mark.group(2), number
        elif fence is not None and mark and line.strip() == fence:
            before = [text for text in lines[: start - 1] if text.strip()]
            said = NOT_EXECUTED.match(before[-1]) if before else None
            text = "\n".join(lines[start : number - 1]) + "\n"
            found.append(Block(page, start + 1, language, text, said.group(1).strip() if said else None))
            fence = None
    if fence is not None:
        raise AssertionError(f"{page}:{start}: a block is not closed")
    return [block for block in found if not languages or block.language in languages]


def prose(page: str) -> str:
    """Return the text of a page without its fenced blocks."""
    kept, fence = [], None
    for line in (ROOT / page).read_text().splitlines():
        mark = FENCE.match(line)
        if fence is None:
            fence = mark.group(1) if mark else None
            kept += [] if mark else [line]
        elif mark and line.strip() == fence:
            fence = None
    return "\n".join(kept) + "\n"


def links(page: str) -> list[str]:
    """Return the targets of a page's links and images, except those on other hosts."""
    text = CODE_SPAN.sub("", prose(page))
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", prose(str(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands(page: str) -> list[Command]:
    """Return the commands in the page's shell blocks, and those that its text mentions as code."""
    found = [Command(page, words) for block in blocks(page, *SHELLS) for words in shell_commands(block.text)]
    for _, span in CODE_SPAN.findall(prose(page)):
        if re.match(r"(hrm-hf|python training/|torchrun|accelerate launch|make) ?", span) or "training/run_" in span:
            found += [Command(page, words, mention=True) for words in shell_commands(span)]
    return found


def shell_commands(text: str) -> list[tuple[str, ...]]:
    """Split shell text into simple commands, without redirections, comments and leading assignments."""
    found, pending = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="".join(OPERATORS))
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation continues on the next line
            continue
        pending, simple = "", []
        for word in [*words, ";"]:
            if set(word) <= OPERATORS:
                found += _simple(simple)
                simple = []
            else:
                simple.append(word)
    if pending:
        raise AssertionError(f"a quotation is not closed: {pending!r}")
    return found


def _simple(words: list[str]) -> list[tuple[str, ...]]:
    while words and (words[0] in ("do", "exec", "nohup", "time") or re.match(r"\w+=", words[0])):
        words = words[1:]
    if "bash" in words and "-c" in words:
        return shell_commands(words[words.index("-c") + 1])
    return [tuple(words)] if words else []


def check(command: Command) -> None:
    """Raise CommandError if the command, or an option or file in it, does not exist."""
    words = [word for word in command.words if word != "..."]
    partial = command.mention or len(words) < len(command.words)
    for word in words:
        path = word.rpartition("=")[2]
        if OWN_FILE.match(path) and not list(ROOT.glob(path.removeprefix("./"))):
            raise CommandError(f"{_said(command)}: there is no {path}")
    script = next((at for at, word in enumerate(words) if SCRIPT.match(word)), None)
    if words[0] == "hrm-hf":
        _check_cli(command, words[1:], partial)
    elif words[0] == "make" and len(words) > 1 and words[1] not in make_targets():
        raise CommandError(f"{_said(command)}: the Makefile has no target {words[1]!r}")
    elif words[0] == "sbatch":
        flags = [word for word in words[_after(words, ".sbatch") :] if word.startswith("--")]
        _check_options(command, flags, known_options())
    elif script is not None:
        _check_launcher(command, words[:script])
        _check_script(command, Path(words[script]).stem, words[script + 1 :], partial)


def _check_cli(command: Command, words: list[str], partial: bool) -> None:
    here = typer.main.get_command(app)
    while hasattr(here, "commands"):  # a group
        if not words or words[0].isupper():
            return
        if words[0] not in here.commands and words[0] != "--help":
            raise CommandError(
                f"{_said(command)}: hrm-hf has no {words[0]!r} there; it has {', '.join(here.commands)}"
            )
        if words[0] == "--help":
            return
        here, words = here.get_command(None, words[0]), words[1:]
    if "--help" in words:
        return
    try:
        context = here.make_context("hrm-hf", list(words))
    except Exception as error:
        # Typer vendors click, so compare errors by name. A user's files do not exist here.
        kind, text = type(error).__name__, str(error)
        cut_short = partial and kind in ("MissingParameter", "BadOptionUsage")
        if cut_short or "does not exist" in text:
            return
        raise CommandError(f"{_said(command)}: {kind} {text}") from error
    if context.args and here.name == "launch":  # it forwards flags
        _check_script(command, "run_clm", context.args, partial)


def _check_launcher(command: Command, words: list[str]) -> None:
    if words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        _check_options(command, words, set(launch_command_parser()._option_string_actions))
    elif words[:1] == ["torchrun"]:
        from torch.distributed.run import get_args_parser

        _check_options(command, words, set(get_args_parser()._option_string_actions))


def _check_script(command: Command, script: str, words: list[str], partial: bool) -> None:
    if script == "launch":
        return _check_cli(command, ["launch", *words], partial)
    if script == "evaluate":
        return _check_options(command, words, known_options())
    if script == "pretrain":
        keys = [word for word in words if not word.startswith("--")]
        if keys:
            parse_command(keys)
        return _check_options(command, words, script_options("run_puzzle"))
    _check_options(command, words, script_options(script))
    _check_overrides(command, words)


def _check_options(command: Command, words: list[str], known: set[str]) -> None:
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in known:
            raise CommandError(f"{_said(command)}: there is no option {word.partition('=')[0]}")


def _check_overrides(command: Command, words: list[str]) -> None:
    """Check that the fields of --config_overrides exist in the config of the command's model."""
    given = dict(pairwise(words))
    recipe = given.get("--recipe", "")
    fields = yaml.safe_load((ROOT / recipe).read_text()) if (ROOT / recipe).is_file() else {}
    model_type = given.get("--model_type", fields.get("model_type"))
    if "--config_overrides" in given and model_type:
        try:
            build_config(ModelArguments(model_type=model_type, config_overrides=given["--config_overrides"]))
        except ValueError as error:
            raise CommandError(f"{_said(command)}: {error}") from error


@functools.cache
def script_options(script: str) -> set[str]:
    """Return a training script's options: those of the argument classes it passes to `parse_recipe`."""
    specification = importlib.util.spec_from_file_location(script, ROOT / "training" / f"{script}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    classes = []

    def stop(dataclasses, **kwargs):
        classes.extend(dataclasses)
        raise StopIteration

    with patch("hrm_hf.trainer.recipes.parse_recipe", stop), suppress(StopIteration):
        module.main()
    if not classes:
        raise AssertionError(f"training/{script}.py has not called parse_recipe")
    return {"--recipe", "--help", *HfArgumentParser(classes)._option_string_actions}


@functools.cache
def known_options() -> set[str]:
    """Return the options of the training scripts, `hrm-hf` and the launchers."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    found = set(launch_command_parser()._option_string_actions) | set(get_args_parser()._option_string_actions)
    for path in sorted((ROOT / "training").glob("run_*.py")):
        found |= script_options(path.stem)
    rest = [typer.main.get_command(app)]
    while rest:
        here = rest.pop()
        found |= {name for parameter in here.params for name in parameter.opts}
        rest += [here.get_command(None, name) for name in getattr(here, "commands", ())]
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def table_options(page: str) -> list[str]:
    """Return the options that are the only code in a last column of the page's tables."""
    cells = [line.strip().strip("|").split(" | ")[-1] for line in prose(page).splitlines() if line.startswith("| ")]
    spans = [span for cell in cells for _, span in CODE_SPAN.findall(cell)]
    return [word for span in spans if span.startswith(("--", "... --")) for word in span.split() if word[:2] == "--"]


def _after(words: list[str], ending: str) -> int:
    return next((at + 1 for at, word in enumerate(words) if word.endswith(ending)), len(words))


def _said(command: Command) -> str:
    return f"{command.page}: `{shlex.join(command.words)}`"
