"""The documentation is correct: the site builds, its code runs, its commands and links exist.

Each block runs in its own namespace, in the folder left by the page's earlier blocks. Tiny checkpoints stand in for
those that a page's commands make. The referees of commands are the programs' own parsers (`docs_pages.py`).
"""

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import docs_pages
import every
import numpy as np
import pytest
import tiny_go
import tiny_lm
import torch
from docs_pages import PAGES, ROOT, Command, CommandError
from PIL import Image
from transformers import AutoConfig

import hrm_hf
from hrm_hf import TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.puzzles.options import shipped_model
from hrm_hf.text.byte_tokenizer import byte_tokenizer


EXECUTED = [page for page in PAGES if any(block.reason is None for block in docs_pages.blocks(page, "python"))]
SLOW = {"docs/export.md": pytest.mark.slow}  # exports take a minute
COMING_FROM = [page for page in PAGES if "/coming_from/" in page]


def build(project: Path, out: Path) -> subprocess.CompletedProcess:
    """Run `mkdocs build --strict`, without --quiet, which would hide warnings from the count."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)],
        cwd=project, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; another test builds it strictly."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A folder like the one that `make demo`, `make demo-go` and two map recipes leave, with tiny models."""
    folder = tmp_path_factory.mktemp("docs")
    torch.manual_seed(0)
    config = TrmPuzzleConfig(
        hidden_size=16, num_attention_heads=1, L_layers=1, H_cycles=1, L_cycles=1, expansion=1, puzzle_emb_ndim=0,
        halt_max_steps=4, task="sudoku", grid_shape=[9, 9], box_shape=[3, 3],
    )  # fmt: skip
    TrmPuzzleForSolving(config).save_pretrained(folder / "runs" / "sudoku_demo")
    tiny_go.model(**tiny_go.SHORT).save_pretrained(folder / "runs" / "go_demo")
    tiny_go.tokenizer().save_pretrained(folder / "runs" / "go_demo")
    every.save("hrm_cosmo", folder / "runs" / "cosmo_lognormal_64")
    every.save("hrm_mass_mapping", folder / "runs" / "mass_lognormal_64")
    for name in ("hrm_lm", "rlm_mhc"):
        every.save(name, folder / "runs" / name)
    tokenizer = byte_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    every.model("hrm_lm", **ids).save_pretrained(folder / "runs" / "hrm_lm_shakespeare")
    tokenizer.save_pretrained(folder / "runs" / "hrm_lm_shakespeare")
    guide = [block.text for block in docs_pages.blocks("docs/your_own_puzzle.md", "python")]
    (folder / "queens.py").write_text(guide[0])
    (folder / "x_sudoku.py").write_text(guide[3])
    (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 200)
    fits = pytest.importorskip("astropy.io.fits")
    fits.writeto(folder / "map.fits", np.random.default_rng(0).normal(0, 1, (16, 16)).astype(np.float32))
    return folder


def test_the_site_builds_strictly_with_every_page_in_its_navigation(site):
    assert (site / "index.html").is_file()
    for page in PAGES[1:]:
        built = Path(page).relative_to("docs").with_suffix("")
        folder = built.parent if built.name == "index" else built
        assert (site / folder / "index.html").is_file(), page


def test_every_public_name_is_in_the_api_reference(site):
    pages = "".join(path.read_text() for path in (site / "api").rglob("*.html"))
    for name in set(hrm_hf.__all__) - {"__version__"}:
        defined = getattr(hrm_hf, name)
        assert f'id="{defined.__module__}.{name}"' in pages, name


def test_fields_and_options_are_listed_in_the_api_reference(site):
    models, training = ((site / "api" / name / "index.html").read_text() for name in ("hrm_lm", "arguments"))
    assert "<strong>halt_margin</strong> (0.0): " in models
    assert "<strong>puzzle_emb_lr</strong> (<code>float</code>, <code>0.01</code>): " in training


def test_site_loads_no_asset_from_another_host(site):
    outside = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(https?:)?//[^\"' >]+")
    imported = re.compile(r"@import|url\([\"']?(?:https?:)?//")
    for path in site.rglob("*.html"):
        found = [match.group() for match in outside.finditer(path.read_text()) if "canonical" not in match.group()]
        assert not found, (path, found)
    for path in site.rglob("*.css"):
        assert not imported.search(path.read_text()), path


def run_blocks(page: str, checkpoints: Path, folder: Path, run) -> None:
    """Call `run` with each executed block after empty lines, so that tracebacks name the page's lines."""
    shutil.copytree(checkpoints, folder, dirs_exist_ok=True)
    for block in docs_pages.blocks(page, "python"):
        if block.reason is None:
            run("\n" * (block.line - 1) + block.text)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # of TRL
@pytest.mark.parametrize("page", [pytest.param(page, marks=SLOW.get(page, ())) for page in EXECUTED])
def test_each_python_block_of_a_page_runs_without_the_names_of_others(page, checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> None:
        assert "hrm_hf" in text or not re.search(r"\bpipeline\(|\bAuto\w+\.", text), "nothing registers our classes"
        exec(compile(text, str(ROOT / page), "exec"), {"__name__": "__main__"})

    run_blocks(page, checkpoints, tmp_path, run)


@pytest.mark.slow
@pytest.mark.parametrize("page", EXECUTED)
def test_each_python_block_of_a_page_runs_in_a_new_process(page, checkpoints, tmp_path):
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "check": True, "capture_output": True}
    done, python = [], [sys.executable, "-c"]
    run_blocks(page, checkpoints, tmp_path, lambda text: done.append(subprocess.run([*python, text], **options)))
    assert b"gradient_checkpointing` is deprecated" not in b"".join(one.stderr for one in done)


def run_commands(commands: list[tuple[str, ...]], folder: Path) -> str:
    """Run commands in fresh processes, and return the output of the last one."""
    how = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    for program, *arguments in commands:
        command = [sys.executable, *(("-m", "hrm_hf.cli") if program == "hrm-hf" else ()), *arguments]
        result = subprocess.run(command, timeout=600, **how)
        assert result.returncode == 0 and "already registered" not in result.stderr, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_the_commands_of_the_go_guide_run_in_order_in_fresh_processes(tmp_path):
    """The guide's commands, from pull requests to the original prompt; only the training sizes are reduced."""
    code = "func Neg{0}(a int) int {{\n\treturn -Neg{0}(a)\n}}\n"
    rows = [{"problem": {"description": "Add Neg"}, "solution": {"code": code.format(number)}} for number in range(12)]
    tiny_go.write(tmp_path / "train.jsonl", rows)
    block = docs_pages.blocks("docs/coming_from/go_coder.md", "bash")[0].text
    install, *commands = docs_pages.shell_commands(block.replace(" training/", f" {ROOT}/training/"))
    commands[-1] += ("--max_steps", "2", "--config_overrides", "hidden_size=32,intermediate_size=64")
    write = 'write = pipeline("text-generation", model="runs/go_base", tokenizer="data/go_tokenizer", device=-1)'
    write += '\nwrite("<PR_TITLE> Fix nil", max_length=200, num_return_sequences=1, temperature=0.8, top_p=0.95)'
    ours, library = "import hrm_hf\n", "from transformers import pipeline\n"
    commands += [("python", "-c", ours + library + write), ("python", "-c", library + ours + write)]
    commands += docs_pages.shell_commands("hrm-hf eval go runs/go_base --records data/go/train.jsonl --limit 2")
    assert install[0] == "pip" and "loss.code_perplexity: " in run_commands(commands, tmp_path)


@pytest.mark.slow
def test_the_commands_of_the_retrofit_guide_run_in_order_in_fresh_processes(checkpoints, tmp_path):
    """The guide's commands, from the model to the push; only the steps are reduced, and SmolLM2 is a tiny Llama."""
    shutil.copy(checkpoints / "input.txt", tmp_path)
    sizes = {"vocab_size": 264, "num_hidden_layers": 6, "max_position_embeddings": 256}
    tiny_lm.model("llama", **sizes).save_pretrained(tmp_path / "models" / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "models" / "llama")
    block = docs_pages.blocks("docs/retrofit.md", "bash")[0].text.replace(" training/", f" {ROOT}/training/")
    download, *commands = docs_pages.shell_commands(block.replace("HuggingFaceTB/SmolLM2-135M", "models/llama"))
    commands[1] += ("--max_steps", "2")
    assert download[0] == "curl" and "modeling_hrm_lm.py" in run_commands(commands, tmp_path)


@pytest.mark.slow
def test_the_commands_of_the_puzzle_guide_run_in_order_in_fresh_processes(checkpoints, tmp_path):
    """From a task's file or pairs to a push; only training and data are shortened."""
    page = "docs/your_own_puzzle.md"
    for name in ("queens.py", "x_sudoku.py"):
        shutil.copy(checkpoints / name, tmp_path)
    (tmp_path / "queens.yaml").write_text(docs_pages.blocks(page, "yaml")[0].text)
    (tmp_path / "pretrained").symlink_to(ROOT / "pretrained")
    (pairs,) = (block.text for block in docs_pages.blocks(page, "python") if '"pairs.jsonl"' in block.text)
    run_commands([("python", "-c", pairs)], tmp_path)
    for block in (block for block in docs_pages.blocks(page, "bash") if block.reason is None):
        text = re.sub(
            r"--num-(train|test) \d+", r"--num-\1 20", block.text.replace(" training/", f" {ROOT}/training/")
        )
        commands = docs_pages.shell_commands(text)
        commands[1] += ("--max_steps", "2", "--warmup_steps", "1", "--torch_compile", "false")
        assert "modeling_se_rrm_puzzle.py" in run_commands(commands, tmp_path)


def test_every_recipe_is_named_in_some_page():
    text = "".join((ROOT / page).read_text() for page in PAGES)
    recipes = [path.stem for path in sorted((ROOT / "training" / "recipes").glob("*.yaml"))]
    assert [name for name in recipes if not re.search(rf"[`/]{name}(\.yaml|`)", text)] == []


def test_numbers_on_the_go_coder_pages_are_measured():
    section = docs_pages.prose("docs/results/go_coder.md")
    page = docs_pages.prose("docs/architectures/hrm_go_coder.md").partition("## Measured here")[2].partition("## ")[0]
    assert [figure for figure in re.findall(r"(?<![\w.])-?\d+\.\d+", page) if figure not in section] == []
    guide = docs_pages.prose("docs/coming_from/go_coder.md")
    call, size = re.search(r"`(HrmGoCoderConfig\(.*?\))`.*?, ([\d.]+)M", guide).groups()
    with torch.device("meta"):
        model = hrm_hf.HrmGoCoderForCausalLM(eval(f"hrm_hf.{call}"))
    assert f"{model.num_parameters() / 1e6:.1f}" == size


def test_animated_board_shows_the_packaged_solver(tmp_path):
    """Referee: a new run of the solver, compared with the copied or counted values.

    The number of steps does not depend on rounding: kernels of other processors change a confidence by less than 1e-5,
    and the last two are far above and far below the threshold at which the solver stops.
    """
    specification = importlib.util.spec_from_file_location("make_board", ROOT / "docs" / "make_board.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    answer = script.draw(tmp_path / "board.gif")
    with Image.open(script.PICTURE) as committed, Image.open(tmp_path / "board.gif") as drawn:
        assert answer["valid"] and committed.n_frames == drawn.n_frames == answer["steps"] + 1
    bar = AutoConfig.from_pretrained(shipped_model("sudoku")).halt_confidence
    assert answer["confidences"][-2] < bar - 0.05 and answer["confidences"][-1] > (1 + bar) / 2
    assert script.PICTURE.stat().st_size < 300_000
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text()
        assert "images/board.gif" in text and f'("{script.BOARD}")["text"]\n# {answer["text"]}\n' in text


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *(page for page in PAGES if page not in COMING_FROM)])
def test_commands_of_a_page_need_only_what_it_names(page):
    text = (ROOT / page).read_text()
    shell = "\n".join(block.text for block in docs_pages.blocks(page, *docs_pages.SHELLS))
    assert not re.search(r"<[a-z][a-z -]+>|\b(OWNER|ORG)/", shell), "a placeholder"
    assert not re.search(r"pip install [\"']?hrm_hf", text), "the package is in no registry"
    assert "input.txt" not in shell or "karpathy/char-rnn/master/data/tinyshakespeare/input.txt" in text


def test_front_page_lists_exactly_the_extras():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    rows = re.findall(r"^\| (`.*?`) \|", docs_pages.prose("docs/index.md").partition("| extra |")[2], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    table = named[: len(config["options.extras_require"])]  # not the rows of later tables
    assert sorted(table) == sorted(config["options.extras_require"])


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_has_the_options_and_files_it_names(page):
    for command in docs_pages.commands(page):
        docs_pages.check(command)


@pytest.mark.parametrize("page", COMING_FROM)
def test_every_option_in_the_tables_for_users_of_the_originals_exists(page):
    found = docs_pages.table_options(page)
    assert len(found) > 5
    known = docs_pages.known_options()
    assert [word for word in found if word.partition("=")[0] not in known] == []


@pytest.mark.parametrize(
    "text",
    [
        "hrm-hf slove runs/sudoku_demo board",
        "hrm-hf eval puzzels runs/sudoku_demo data",
        "hrm-hf eval puzzles runs/sudoku_demo data --hlat q",
        "hrm-hf eval puzzles runs/sudoku_demo data --halt sometimes",
        "hrm-hf eval puzzles runs/sudoku_demo",
        "python training/run_clm.py --learning_rat 1e-4",
        "python training/run_puzzle.py --recipe training/recipes/sudoku_tiny.yaml",
        "python training/run_puzzle.py --recipe training/recipes/sudoku_small.yaml --config_overrides H_cycle=2",
        "accelerate launch --num_proceses 2 training/run_clm.py --max_steps 1",
        "accelerate launch --config_file accelerate_configs/many_gpus.yaml training/run_clm.py",
        "torchrun --nproc_per_nod 2 training/run_clm.py",
        "python training/launch.py --model hrm-lm-50m --dry_rum",
        "EPOCHS=5 sbatch training/slurm/some_gpus.sbatch",
        "for lr in 1 2; do nohup python training/run_cosmo.py --lr $lr > log & done",
        "make demonstration",
    ],
)
def test_mistyped_command_is_detected(text):
    (command, *_) = [Command("page", words) for words in docs_pages.shell_commands(text) if words[0] != "for"]
    with pytest.raises(CommandError):
        docs_pages.check(command)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *PAGES])
def test_links_to_files_and_headings_resolve_where_pages_are_read_without_the_site(page):
    for target in docs_pages.links(page):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in docs_pages.anchors(file), f"{page}: {target}"
