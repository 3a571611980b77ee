"""The app in headless Chromium: it answers like the pipelines, and no request leaves the machine.

One server and one page with tiny models of all kinds. Screenshots of every tab go to the test's folder;
docs/take_screenshots.py takes those of the documentation, with trained models.
"""

import re
import shutil

import numpy as np
import pytest
import torch
from started import free_port
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hrm_hf  # noqa: F401 - registers the architectures
from hrm_hf.app import build_app, launch
from hrm_hf.app.puzzle_tab import PLAY_SECONDS
from hrm_hf.app.text_tab import text_pieces, write
from hrm_hf.puzzles.options import shipped_model
from hrm_hf.text.options import WriteText


playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: no chromium or google-chrome on the PATH"),
]
# Chromium's own services would send requests.
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SHOWN = ("sudoku", "maze", "hrm_lm", "rlm_mhc", "hrm_go_coder", "hrm_cosmo", "hrm_mass_mapping")
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
WAIT = 60_000  # milliseconds, for an answer on a busy machine
ANSWER = ".answer-text textarea:visible"
TYPED = "[...document.querySelectorAll('.sudoku-input input')].filter((e) => e.offsetParent).map((e) => e.value)"
BOARD = (
    "[...document.querySelectorAll('.shown-board .hrm-board > span')].filter((e) => e.offsetParent)"
    ".map((cell) => cell.textContent)"
)
# Selector of what a tab shows once its example is answered.
ANSWERED = {
    "Sudoku · sudoku": ANSWER,
    "Maze · maze": ANSWER,
    "Text · hrm_lm": ".hrm-text .depth",
    "Text · rlm_mhc": ".hrm-text span",
    "mHC · rlm_mhc": ".mhc-gains img",
    "Go coder · hrm_go_coder": ".hrm-attempt",
    "Cosmology · hrm_cosmo": ".cosmology-posterior img",
    "Mass map · hrm_mass_mapping": ".mass-map-segments img",
    "Sudoku · sudoku-9x9": ANSWER,
}
# Tabs whose models have newly initialized weights; the tests set the weights of the others.
FRESH = ("Text · rlm_mhc", "mHC · rlm_mhc", "Cosmology · hrm_cosmo", "Mass map · hrm_mass_mapping")
# Records the steps that boards have shown, in order.
RECORDER = """window.steps = [];
    new MutationObserver(() => document.querySelectorAll('.shown-board [data-step]').forEach((board) => {
        if (Number(board.dataset.step) !== window.steps.at(-1)) window.steps.push(Number(board.dataset.step));
    })).observe(document, { subtree: true, childList: true });"""
BUTTONS = """[...document.querySelectorAll('button')].filter((e) => e.offsetParent && e.textContent.trim().length > 1)
    .map((e) => [e.textContent.trim(), e.getBoundingClientRect()])
    .map(([text, box]) => [text, box.left, box.right, box.height])"""
BOARDS = """[...document.querySelectorAll('.hrm-board')].filter((e) => e.offsetParent)
    .map((e) => e.getBoundingClientRect()).map((box) => [box.left, box.right])"""


@pytest.fixture(scope="module")
def served(checkpoints):
    """URL of the page with all models."""
    demo = build_app([*(str(checkpoints[name]) for name in SHOWN), shipped_model("sudoku")])
    _, address, _ = launch(demo, server_name="127.0.0.1", server_port=free_port(), prevent_thread_lock=True)
    yield address
    demo.close(verbose=False)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


def visit(browser, address: str, **options):
    """Open the page in a new window, wait for its first answer, and return it with the list of later errors."""
    page, wrong = browser.new_context(**options).new_page(), []
    page.set_default_timeout(WAIT)
    page.add_init_script(RECORDER)
    expect.set_options(timeout=WAIT)
    page.on("request", lambda request: wrong.append(request.url) if is_outside(request.url) else None)
    page.on("websocket", lambda opened: wrong.append(opened.url) if is_outside(opened.url) else None)
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(address)
    page.locator(ANSWER).wait_for()
    return page, wrong


@pytest.fixture(scope="module")
def visited(browser, served):
    """The page at desktop size, and its errors: requests to other hosts and console errors."""
    page, wrong = visit(browser, served, viewport={"width": 1440, "height": 900})
    yield page, wrong
    page.context.close()


def is_outside(url: str) -> bool:
    return not re.match(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:", url)


@pytest.fixture
def page(visited, tmp_path):
    """The page; fails the test if there were errors or if the screenshot is blank."""
    page, wrong = visited
    yield page
    picture = page.screenshot(path=tmp_path / "tab.png")
    assert len(picture) > 10_000
    assert wrong == []


def open_tab(page, name: str):
    page.get_by_role("tab", name=name, exact=True).click()
    page.get_by_role("tabpanel").filter(visible=True).first.wait_for()


def press(page, name: str):
    page.get_by_role("button", name=name, exact=True).filter(visible=True).first.click()


def shown_step(page, step: int) -> list[str]:
    """Return the cells of the solved board once it shows the step."""
    page.wait_for_selector(f".shown-board [data-step='{step}']:visible")
    return page.evaluate(BOARD)


def wait_for_board(page, step: int, text: str) -> None:
    """Wait until the solved board shows the step with this text; a step of an earlier board may be on the page."""
    page.wait_for_selector(f".shown-board [data-step='{step}']:visible")
    page.wait_for_function(f"(text) => {BOARD}.map((cell) => cell || '.').join('') === text", arg=text)


def test_a_typed_board_is_solved_and_read_back_step_by_step(page, checkpoints):
    solver = pipeline("puzzle-solving", model=str(checkpoints["sudoku"]))
    puzzle = "1....2....3....4"
    result = solver(puzzle, return_trajectory=True)
    open_tab(page, "Sudoku · sudoku")
    press(page, "Clear")
    page.wait_for_function("![...document.querySelectorAll('.sudoku-input input')].some((cell) => cell.value)")
    for cell, digit in enumerate(puzzle):
        if digit != ".":
            page.get_by_label(f"row {cell // 4 + 1}, column {cell % 4 + 1}").fill(digit)
    press(page, "Solve")
    wait_for_board(page, result["steps"], result["text"])
    expect(page.locator(ANSWER)).to_have_value("\n".join("".join(map(str, row)) for row in result["grid"]))
    slider = page.get_by_role("slider", name=re.compile("Step")).filter(visible=True).first
    for step in range(result["steps"]):
        slider.fill(str(step))
        tokens = solver.puzzle_task.encode(puzzle) if step == 0 else np.array(result["trajectory"][step - 1])
        wait_for_board(page, step, solver.puzzle_task.text(tokens))
    expect(page.locator(".hrm-chart rect")).to_have_count(5)
    assert result["steps"] == 5


def test_first_view_plays_the_steps_until_a_visitor_moves_the_slider(browser, served):
    page, wrong = visit(browser, served)
    page.wait_for_function("window.steps.some((step) => step < 5) && window.steps.at(-1) === 5")
    shown = page.evaluate("window.steps.length")
    press(page, "Play")
    page.wait_for_function(f"window.steps.length > {shown} + 1")  # it has moved on from step 0
    page.get_by_role("slider", name=re.compile("Step")).filter(visible=True).first.fill("0")
    page.wait_for_function("window.steps.at(-1) === 0")
    page.wait_for_timeout(2500 * PLAY_SECONDS)
    assert page.evaluate("window.steps.at(-1)") == 0 and wrong == []
    page.context.close()


def test_a_pasted_puzzle_fills_the_board_and_arrow_keys_move(page):
    open_tab(page, "Sudoku · sudoku")
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.setData('text', '12.. 34.. .... ...1');
            const cell = document.querySelector('.sudoku-input input');
            cell.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}));
        }"""
    )
    page.wait_for_function(f"{TYPED}.map((digit) => digit || '.').join('') === '12..34.........1'")
    page.get_by_label("row 1, column 1").click()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("row 2, column 2").filter(visible=True)).to_be_focused()


def test_too_large_digit_replaces_the_answer_with_the_pipelines_error(page):
    open_tab(page, "Sudoku · sudoku")
    cell = page.get_by_label("row 1, column 2").filter(visible=True)
    cell.fill("10")
    before = page.evaluate(TYPED)
    press(page, "Solve")
    refused = page.locator(".shown-board .hrm-refused:visible")
    expect(refused).to_contain_text("row 1, column 2: digit 10")
    expect(page.locator(f"{ANSWER}, .hrm-chart:visible")).to_have_count(0)
    assert page.evaluate(TYPED) == before
    cell.fill("")
    press(page, "Solve")
    page.locator(ANSWER).wait_for()
    expect(refused).to_have_count(0)


def test_an_example_fills_and_solves_with_one_click(page):
    open_tab(page, "Sudoku · sudoku")
    press(page, "Hard example")
    page.wait_for_function(
        "[...document.querySelectorAll('.sudoku-input input')].filter((cell) => cell.value).length === 6"
    )
    page.wait_for_function("document.querySelectorAll('.shown-board .given').length === 6")


def test_maze_is_solved_from_its_rows_and_wrong_rows_are_reported(page, checkpoints):
    solver = pipeline("puzzle-solving", model=str(checkpoints["maze"]))
    open_tab(page, "Maze · maze")
    puzzle = page.get_by_role("textbox", name="Puzzle").filter(visible=True)
    expect(puzzle).not_to_be_empty()
    rows = puzzle.input_value()
    press(page, "Solve")
    expect(page.locator(ANSWER)).to_have_value(solver(rows)["text"])
    puzzle.fill("##\n##")
    press(page, "Solve")
    page.get_by_text("the maze has 2 lines of [2] cells; expected 5 of 6").first.wait_for()
    expect(page.locator(ANSWER)).to_have_count(0)
    puzzle.fill(rows)


def test_text_is_colored_by_the_halt_steps_of_its_tokens(page, checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["hrm_lm"])
    model = AutoModelForCausalLM.from_pretrained(checkpoints["hrm_lm"]).eval()
    *_, ids = write(model, tokenizer, "Once", WriteText(max_new_tokens=128, num_segments=3, exit_criterion="q"))
    with torch.no_grad():
        depths = model(torch.tensor([ids])).halt_steps[0].tolist()
    open_tab(page, "Text · hrm_lm")
    page.get_by_role("textbox", name="Prompt").filter(visible=True).fill("Once")
    press(page, "Write")
    pieces = text_pieces(tokenizer, ids)
    # Read everything at once: the page may be redrawn before a second query.
    shown = page.wait_for_function(
        "(count) => { const found = [...document.querySelectorAll('.hrm-text .depth')]; return found.length === count"
        " && found.slice(0, 4).map((e) => e.textContent).join('') === 'Once'"
        " && found.map((e) => [e.textContent, e.dataset.depth]); }",
        arg=len(pieces),
    ).json_value()
    assert len(set(depths)) > 1
    assert [int(depth) for _, depth in shown] == [max(depths[start:stop]) for _, start, stop in pieces]
    printable = [(here, there) for (here, _), (there, _, _) in zip(shown, pieces) if there.isprintable()]
    assert len(printable) > 4 and all(here == there for here, there in printable)


def test_a_go_task_shows_plan_code_verdict_and_decision(page):
    open_tab(page, "Go coder · hrm_go_coder")
    press(page, "Abs")
    card = page.locator(".hrm-attempt").first
    expect(card.locator("h5")).to_have_text(["PLAN", "CODE", "VERDICT", "DECISION"], use_inner_text=True)
    expect(card.locator("pre")).to_contain_text("func Abs(x int) int {")
    page.get_by_text(re.compile("Validator: (go/parser|tree-sitter)|the syntax is not checked")).first.wait_for()


def test_gains_are_drawn_and_listed(page, checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints["rlm_mhc"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["rlm_mhc"])
    (first, _), *_ = model.get_mhc_metrics(**tokenizer("To be, or not to be,", return_tensors="pt"))
    open_tab(page, "mHC · rlm_mhc")
    press(page, "Measure")
    page.wait_for_selector(".mhc-gains img")
    page.wait_for_function("document.querySelector('.mhc-gains img').naturalWidth > 500")
    page.get_by_text(str(round(first, 6))).filter(visible=True).first.wait_for()


def test_a_drawn_and_an_uploaded_map_have_posteriors(page, checkpoints, tmp_path):
    infer = pipeline("cosmology-regression", model=str(checkpoints["hrm_cosmo"]))
    open_tab(page, "Cosmology · hrm_cosmo")
    press(page, "Sample a map and infer")
    page.wait_for_function("document.querySelector('.cosmology-posterior img')?.naturalWidth > 300")
    page.wait_for_function("document.querySelector('.cosmology-map img')?.naturalWidth > 300")
    kappa = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    np.save(tmp_path / "map.npy", kappa)
    expected = infer(kappa, num_samples=4000)
    panel = page.get_by_role("tabpanel").filter(visible=True)
    upload = panel.locator("input[type=file]").first
    upload.set_input_files(tmp_path / "map.npy")
    page.get_by_text(f"{expected['omega_m']['mean']:.3f}").filter(visible=True).first.wait_for()
    page.get_by_text("unknown").filter(visible=True).first.wait_for()
    (tmp_path / "sky.fits").write_bytes(b"no FITS at all")
    upload.set_input_files(tmp_path / "sky.fits")
    page.get_by_text(re.compile("sky.fits")).first.wait_for()
    expect(page.locator(".cosmology-posterior img:visible")).to_have_count(0)


def test_tab_describes_its_model_and_runs_its_example_once(browser, served):
    page, wrong = visit(browser, served, viewport={"width": 1440, "height": 900})
    solver = pipeline("puzzle-solving", model=shipped_model("sudoku"))
    open_tab(page, "Sudoku · sudoku-9x9")
    page.locator(ANSWER).wait_for()
    about = page.locator(".hrm-about:visible").inner_text()
    assert "Trained on hrm-hf data sudoku" in about and "84,256 parameters" in about
    page.locator(".hrm-about summary:visible").click()
    expect(page.get_by_role("heading", name="Results").filter(visible=True)).to_have_count(1)
    typed = "".join(digit or "." for digit in page.evaluate(TYPED))
    expect(page.locator(ANSWER)).to_have_value(re.compile(r"\s*".join(solver(typed)["text"])))
    press(page, "Clear")
    page.locator(ANSWER).wait_for(state="detached")
    open_tab(page, "Maze · maze")
    open_tab(page, "Sudoku · sudoku-9x9")
    page.wait_for_timeout(500)
    assert page.locator(ANSWER).count() == 0
    assert wrong == []
    page.context.close()


@pytest.mark.slow
def test_every_tab_fits_a_phone_and_shows_its_model_and_example(browser, served, tmp_path):
    """At 390 pixels: no horizontal scrolling, buttons large enough to touch, digits of at least 15 pixels."""
    page, wrong = visit(browser, served, **PHONE)
    for name, answered in ANSWERED.items():
        page.get_by_role("tab", name=name, exact=True).tap()
        page.locator(answered).filter(visible=True).first.wait_for()
        about = page.locator(".hrm-about:visible").inner_text()
        assert about.startswith(f"{name.split(' · ')[1]}: ") and " parameters. " in about
        assert ("untrained" in about) == (name in FRESH), about
        page.screenshot(path=tmp_path / f"{name.split()[-1]}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") == 390, name
        for text, left, right, height in page.evaluate(BUTTONS):
            assert 0 <= left < right <= 390 and height >= 40, (name, text, left, right, height)
        for left, right in page.evaluate(BOARDS):
            assert 0 <= left < right <= 390, (name, left, right)
    size = page.evaluate("getComputedStyle(document.querySelectorAll('.shown-board .hrm-board > span')[0]).fontSize")
    assert float(size.removesuffix("px")) >= 15
    assert wrong == []
    page.context.close()
