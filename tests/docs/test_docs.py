"""The documentation keeps its promises: the site builds, its code runs, its commands and links exist.

Blocks of one page run in order in one namespace, as a reader pastes them. Checkpoints that a page says a command has
made are tiny ones here. The referees of commands are the parsers of the programs themselves (`docs_pages.py`).
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
import torch
import yaml
from docs_pages import PAGES, ROOT, Command, CommandError
from PIL import Image
from transformers import AutoConfig

import hrm_hf
from hrm_hf import TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.puzzles.options import shipped_model


CHROMIUM = "/usr/bin/chromium"
EXECUTED = [page for page in PAGES if any(block.reason is None for block in docs_pages.blocks(page, "python"))]
SLOW = {"docs/export.md": pytest.mark.slow}  # exports for a minute
COMING_FROM = [page for page in PAGES if "/coming_from/" in page]


def build(project: Path, out: Path) -> subprocess.CompletedProcess:
    """`mkdocs build --strict`. Not with --quiet: warnings that are not shown would not be counted."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)],
        cwd=project, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; building it strictly is a test of its own."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A folder with what `make demo`, `make demo-go` and two recipes of maps leave, from models of a few weights."""
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
    models, training = ((site / "api" / name / "index.html").read_text() for name in ("hrm_lm", "trainers"))
    assert "<strong>halt_margin</strong> (0.0): a token halts if" in models
    assert "<strong>puzzle_emb_lr</strong> (<code>float</code>, <code>0.01</code>): Learning rate of" in training


def test_a_broken_link_or_anchor_fails_the_build(tmp_path):
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[no page](none.md), [no heading](#there)\n")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    own = {"site_name": "x", "plugins": [], "nav": [{"Start": "index.md"}], "validation": config["validation"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(own))
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode == 1
    assert "'none.md'" in result.stderr and "'#there'" in result.stderr


def test_site_loads_no_asset_from_another_host(site):
    outside = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(https?:)?//[^\"' >]+")
    imported = re.compile(r"@import|url\([\"']?(?:https?:)?//")
    for path in site.rglob("*.html"):
        found = [match.group() for match in outside.finditer(path.read_text()) if "canonical" not in match.group()]
        assert not found, (path, found)
    for path in site.rglob("*.css"):
        assert not imported.search(path.read_text()), path


@pytest.mark.external
@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"no browser at {CHROMIUM}")
def test_a_browser_reads_the_site_without_a_request_to_another_host(site, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    arguments = [
        "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync",
    ]  # fmt: skip
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    requests, errors = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/"
        with playwright.sync_playwright() as browsers:
            browser = browsers.chromium.launch(executable_path=CHROMIUM, args=arguments)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.on("request", lambda request: requests.append(request.url))
            page.on("pageerror", lambda error: errors.append(str(error)))
            with page.expect_response(lambda response: "search_index" in response.url):  # searched in the browser
                page.goto(base)
            assert page.locator("h1").first.inner_text().startswith("hrm_hf")
            page.locator("input.md-search__input").press_sequentially("Sinkhorn", delay=50)
            page.locator(".md-search-result__link").first.wait_for()
            page.goto(base + "architectures/hrm_puzzle/")
            browser.close()
        server.shutdown()
    assert not errors
    assert [url for url in requests if not url.startswith((base, "data:", "blob:"))] == []


@pytest.mark.parametrize("page", [pytest.param(page, marks=SLOW.get(page, ())) for page in EXECUTED])
def test_the_python_blocks_of_a_page_run_in_order(page, checkpoints, tmp_path, monkeypatch):
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in docs_pages.blocks(page, "python"):
        if block.reason is None:
            # As many empty lines before it as in the page, so that a traceback names the line there.
            exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec"), namespace)


def test_every_recipe_is_named_in_some_page():
    text = "".join((ROOT / page).read_text() for page in PAGES)
    recipes = [path.stem for path in sorted((ROOT / "training" / "recipes").glob("*.yaml"))]
    assert [name for name in recipes if not re.search(rf"[`/]{name}(\.yaml|`)", text)] == []


def test_animated_board_shows_the_packaged_solver(tmp_path):
    """Referee: the solver, run again, of which what is copied or counted is compared.

    The number of steps hangs on no rounding: kernels of other processors move a confidence by less than 1e-5, and the
    last two are far above and far below the bar at which the solver stops.
    """
    specification = importlib.util.spec_from_file_location("make_board", ROOT / "docs" / "make_board.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    answer = script.draw(tmp_path / "board.gif")
    with Image.open(script.PICTURE) as committed, Image.open(tmp_path / "board.gif") as drawn:
        assert answer["valid"] and committed.n_frames == drawn.n_frames == answer["steps"] + 1
    bar = AutoConfig.from_pretrained(shipped_model("sudoku")).halt_confidence
    assert answer["confidences"][-2] < bar - 0.05 and answer["confidences"][-1] > bar + 0.05
    assert script.PICTURE.stat().st_size < 300_000
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text()
        assert "images/board.gif" in text and f'("{script.BOARD}")["text"]\n# {answer["text"]}\n' in text


def test_every_extra_is_named_on_the_front_page_and_no_other():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    rows = re.findall(r"^\| (`.*?`) \|", docs_pages.prose("docs/index.md").partition("| extra |")[2], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    table = named[: len(config["options.extras_require"])]  # the next table names other things
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
