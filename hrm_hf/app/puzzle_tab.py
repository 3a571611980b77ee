"""Tab for a puzzle model: an editable board, the answer after each step, and the model's confidence.

The task of the model determines how visitors type a puzzle and how boards look.
"""

import functools
import html
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

import gradio as gr
import numpy as np

from ..models.settings_puzzle import DEFAULT_NOISE
from ..puzzles.options import SolveOptions
from ..puzzles.pipeline import PuzzleSolvingPipeline
from ..puzzles.plots import changed_cells
from ..puzzles.tasks import PuzzleTask
from .limits import MAX_CELL_TEXT, MAX_PUZZLE_TEXT, MAX_SEED, PAGE_EVENT, ask


OPTIONS = {  # fields of `SolveOptions` that get a control: a slider's (minimum, maximum, step), or None for others
    "max_steps": (1, 1024, 1), "votes": (1, 16, 1), "restarts": (1, 8, 1), "noise": (0, 2, 0.01), "noise_at": None,
    "choose": None, "exit_when_still": (0, 0.1, 0.001), "halt": None, "prefer_valid": None, "seed": None,
}  # fmt: skip
# Legends of boards without and with a palette: the CSS style of each swatch and its meaning.
SYMBOLS = {"background: #e3e8ee": "given", "background: #ffffff": "filled in",
           "background: #ffe08a": "changed in this step", "background: #f6b3ab": "breaks a rule"}  # fmt: skip
RINGS = {"box-shadow: inset 0 0 0 2px #f5c518": "changed in this step",
         "box-shadow: inset 0 0 0 2px #e0201b": "breaks a rule"}  # fmt: skip
BOARD_PIXELS = 324  # maximum width and height of a board
MAX_CELL = 44
MAX_PROBLEMS = 3  # maximum number of rule violations listed in a caption; the caption counts the rest
MOST_LINES = 32  # number of lines in a text field before it scrolls
PLAY_SECONDS = 0.45  # seconds per step during playback
# JavaScript that starts and stops the timer and moves the slider at each tick. `undefined` leaves an output unchanged.
ACTIVE, STILL = ({"__type__": "update", "active": active} for active in (True, False))
PLAY, STOP = f"() => [0, {json.dumps(ACTIVE)}]", f"() => ({json.dumps(STILL)})"
ADVANCE = f"(step, last) => step < last ? [step + 1, undefined] : [undefined, {json.dumps(STILL)}]"
# Events that draw a board run one at a time. Otherwise, an event could draw a board that another event has replaced.
BOARD_EVENT: dict[str, Any] = {**PAGE_EVENT, "concurrency_limit": 1, "concurrency_id": "boards"}
MAX_EXAMPLE_SEED = 2**31
ABOUT = "The model fills in the complete puzzle at once, then revises its answer in each step until it is confident."
INVITATION = "<p>Solve a puzzle to see the answer take shape, step by step.</p>"
# The template does not depend on the value, so a cell keeps focus when the server updates the value.
CELLS_SCRIPT = """
const inputs = [...element.querySelectorAll('input')];
const size = Math.round(Math.sqrt(inputs.length));
const show = () => inputs.forEach((input, i) => { input.value = props.value[i] ?? ''; });
const read = () => { props.value = inputs.map((input) => input.value.trim()); };
const moves = { ArrowUp: -size, ArrowDown: size, ArrowLeft: -1, ArrowRight: 1 };
element.addEventListener('input', read);
element.addEventListener('focusin', (event) => event.target.select());
element.addEventListener('keydown', (event) => {
  const cell = inputs.indexOf(event.target);
  const next = inputs[cell + (moves[event.key] ?? inputs.length)];
  if (next) { event.preventDefault(); next.focus(); }
});
element.addEventListener('paste', (event) => {
  const cells = [...event.clipboardData.getData('text')].filter((character) => !/\\s/.test(character));
  if (cells.length !== inputs.length) return;
  event.preventDefault();
  inputs.forEach((input, i) => { input.value = '.0'.includes(cells[i]) ? '' : cells[i]; });
  read();
});
watch('value', show);
show();
"""


@dataclass(frozen=True)
class SolvedBoard:
    """Puzzle of S cells with the answer after each step.

    Attributes:
        states: tokens [1 + steps, S], the puzzle and the answer after each step.
        confidences: sigmoid(q_halt) [steps]. result: output of the pipeline.
    """

    states: np.ndarray
    confidences: list[float]
    result: dict[str, Any]

    @property
    def puzzle(self) -> np.ndarray:
        return self.states[0]

    @property
    def last_step(self) -> int:
        return len(self.states) - 1


def board_html(task: PuzzleTask, board: SolvedBoard, step: int) -> str:
    """Return the board after a step as HTML, with given, filled, changed and rule-breaking cells marked.

    A given cell is never marked as changed: a model that changes it breaks a rule.
    """
    tokens = board.states[step]
    given, changed = task.given(board.puzzle), changed_cells(task, board.states, step)
    wrong = task.wrong_cells(board.puzzle, tokens) if step else np.zeros(len(tokens), dtype=bool)
    rows, columns = task.window(board.states)
    cells = []
    for cell in range(len(tokens)):
        row, column = divmod(cell, task.grid_shape[1])
        if row >= rows or column >= columns:
            continue
        text, style, classes = _cell(task, bool(given[cell]), int(tokens[cell]))
        classes += ["wrong"] if wrong[cell] else ["changed"] if changed[cell] else []
        classes += box_edges(task, row, column)
        place = f"row {row + 1}, column {column + 1}"
        cells.append(f'<span class="{" ".join(classes)}" style="{style}" title="{place}">{text}</span>')
    kind = "colors" if task.palette else "symbols"
    grid = f'<div class="hrm-board {kind}" style="{board_size(rows, columns)}">{"".join(cells)}</div>'
    return f'<div data-step="{step}">{grid}{_legend(task)}</div>'


def board_size(rows: int, columns: int) -> str:
    """Return CSS variables for the size of a board's cells, which shrink on a narrow page."""
    return f"--columns: {columns}; --most: {min(MAX_CELL, BOARD_PIXELS // max(rows, columns))}px"


def box_edges(task: PuzzleTask, row: int, column: int) -> list[str]:
    """Return the CSS classes of a cell that borders another box to its right or below it."""
    if task.box_shape is None:
        return []
    (box_rows, box_columns), (rows, columns) = task.box_shape, task.grid_shape
    right = (column + 1) % box_columns == 0 and column + 1 < columns
    bottom = (row + 1) % box_rows == 0 and row + 1 < rows
    return ["box-right"] * right + ["box-bottom"] * bottom


def _cell(task: PuzzleTask, given: bool, token: int) -> tuple[str, str, list[str]]:
    """Return the text, CSS style and CSS classes of a cell."""
    text = html.escape(task.label(token))
    if task.palette:
        ink = f"; color: {task.ink(token)}" if text else ""
        return text, f"background: {task.color(token)}{ink}", []
    return text, "", ["given" if given else "filled"]


def _legend(task: PuzzleTask) -> str:
    colors = {f"background: {color}": words for color, words in task.legend.items()}
    marks = colors | RINGS if task.palette else SYMBOLS
    items = "".join(f'<span><i style="{style}"></i>{words}</span>' for style, words in marks.items())
    return f'<div class="hrm-legend">{items}</div>'


def caption(task: PuzzleTask, board: SolvedBoard, step: int) -> str:
    """Return the Markdown caption of a step, with the confidence and the rules that the answer breaks."""
    if not step:
        return "**The puzzle**, before the first step."
    parts = [f"**Step {step} of {board.last_step}**", f"confidence {board.confidences[step - 1]:.3f}"]
    problems = task.violations(board.puzzle, board.states[step])
    if task.has_rules and not problems:
        parts.append(task.praise)
    if step == board.last_step:
        if (sure := board.result.get("sure")) is not None:
            parts.append("sure" if sure else "not sure")
        votes = board.result["votes"]
        parts += [f"{votes['agree']} of {votes['of']} votes"] if votes["of"] > 1 else []
        if "correct" in board.result:
            parts.append("correct" if board.result["correct"] else "not the given solution")
    text = " · ".join(parts)
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        text += f"\n\nBreaks the rules: {html.escape('; '.join(problems[:MAX_PROBLEMS]))}{more}."
    return text


def confidence_chart(confidences: Sequence[float], step: int) -> str:
    """Plot the confidence, sigmoid(q_halt), after each step as an SVG bar chart that highlights one step."""
    width, height, left, top = 460, 92, 34, 8
    base = height - 18
    slot = min(60, (width - left - 6) / len(confidences))
    bars, skip = [], max(1, len(confidences) // 16)
    for index, value in enumerate(confidences):
        tall = value * (base - top)
        color = "#2563a8" if index + 1 == step else "#9db8d9"
        x = left + index * slot
        bars.append(
            f'<rect x="{x + 0.1 * slot:.1f}" y="{base - tall:.1f}" width="{0.8 * slot:.1f}" height="{tall:.1f}" '
            f'fill="{color}"><title>step {index + 1}: {value:.3f}</title></rect>'
        )
        if index % skip == 0:
            bars.append(f'<text x="{x + slot / 2:.1f}" y="{height - 4}" text-anchor="middle">{index + 1}</text>')
    lines = "".join(
        f'<line x1="{left}" x2="{width - 6}" y1="{y:.1f}" y2="{y:.1f}" stroke="#9aa5b1" stroke-width="0.6" '
        f'stroke-dasharray="{dash}"/><text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        for y, label, dash in ((base, "0", ""), ((base + top) / 2, "0.5", "3 3"), (top, "1", "3 3"))
    )
    title = "Confidence that the answer is correct, after each step"
    return (
        f'<div style="font-size: 13px">{title}</div><svg class="hrm-chart" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{title}">{lines}{"".join(bars)}</svg>'
    )


def read_board(solver: PuzzleSolvingPipeline, value: list[str] | str) -> Any:
    """Convert typed text, or a list with the text of each cell, to the pipeline's input format."""
    task = solver.puzzle_task
    if not task.typed_by_cell:
        return task.read_typed(value)
    if isinstance(value, str):
        if len(value) > MAX_PUZZLE_TEXT:
            raise ValueError(f"the board has {len(value):,} characters; the limit is {MAX_PUZZLE_TEXT:,}")
        return value
    if not isinstance(value, list) or len(value) != task.seq_len or not all(isinstance(cell, str) for cell in value):
        raise ValueError(
            f"the board must be a string, or a list of {task.seq_len} strings (one per cell), not "
            f"{type(value).__name__}"
        )
    if (longest := max(map(len, value))) > MAX_CELL_TEXT:
        raise ValueError(f"a cell of the board has {longest:,} characters; expected a single symbol")
    return [task.read_cell(text, cell) for cell, text in enumerate(value)]


def solve_board(solver: PuzzleSolvingPipeline, value: list[str] | str, **options: Any) -> list[SolvedBoard]:
    """Solve a typed puzzle and return every step: one board, or one per test input of an ARC task.

    Args:
        value: list with the cells of a Sudoku, "" for a blank; or the text of another puzzle.
        options: options of the pipeline.
    """
    puzzle = solver.read_puzzle(read_board(solver, value))
    result = solver(puzzle, return_trajectory=True, **options)
    return [
        SolvedBoard(np.array([question, *answer["trajectory"]]), answer["confidences"], answer)
        for question, answer in zip(puzzle.questions, result.get("tests", [result]))
    ]


def example(solver: PuzzleSolvingPipeline, level: int, seed: int) -> list[str] | str:
    """Return an example puzzle as typed text, determined by the seed. Level 0 is the easiest."""
    task = solver.puzzle_task
    found = task.example(level, seed)
    if isinstance(found, str):
        return found
    return [task.label(token) for token in found.tolist()] if task.typed_by_cell else task.text(found)


def first_example(solver: PuzzleSolvingPipeline) -> list[str] | str:
    """Return the hardest example that the model solves, or the easiest one if it solves none."""
    for level in range(solver.puzzle_task.levels - 1, 0, -1):
        if not solver.puzzle_task.has_rules:
            break
        value = example(solver, level, 0)
        if all(board.result["valid"] for board in solve_board(solver, value)):
            return value
    return example(solver, 0, 0)


def show_step(task, board: SolvedBoard, step: int) -> tuple[str, str, str]:
    """Return the board, caption and confidence chart of a step."""
    step = min(max(int(step), 0), board.last_step)
    return board_html(task, board, step), caption(task, board, step), confidence_chart(board.confidences, step)


def puzzle_tab(solver: PuzzleSolvingPipeline, shown: gr.State) -> None:
    """Build the tab that solves puzzles. Its example runs when the tab is first displayed."""
    task = solver.puzzle_task
    boards = gr.State([])
    gr.Markdown(ABOUT)
    with gr.Row():
        with gr.Column(scale=5, min_width=400):
            board = _board_input(solver)
            with gr.Row():
                solve = gr.Button("Solve", variant="primary", min_width=120)
                clear = gr.Button("Clear", min_width=120)
            names = ["Easy example", "Medium example", "Hard example"]
            with gr.Row():
                examples = [
                    (gr.Button(name, size="sm", min_width=90), functools.partial(_any_example, solver, level), board)
                    for level, name in enumerate(names if task.levels > 1 else ["Example"])
                ]
            options = solve_controls(solver.model.config)
        with gr.Column(scale=6, min_width=420):
            answer_board = gr.HTML(INVITATION, elem_classes="shown-board")
            with gr.Row(equal_height=True):
                step = gr.Slider(0, 1, value=0, step=1, label="Step (0 is the puzzle)", visible=False, scale=4)
                play = gr.Button("Play", visible=False, scale=1, min_width=80)
            which = gr.Radio([], label="Test input", visible=False)
            said = gr.Markdown(elem_classes="caption")
            chart = gr.HTML()
            timer, last = gr.Timer(PLAY_SECONDS, active=False), gr.Number(0, visible=False)
            answer = gr.Textbox(
                label="Answer", lines=2, max_lines=MOST_LINES, buttons=["copy"], visible=False,
                elem_classes="answer-text hrm-mono",
            )  # fmt: skip
    view = [answer_board, said, chart]
    everything = [boards, step, play, which, answer, *view, last]

    def solve_typed(typed: list[str] | str, *values: Any) -> list:
        found = solve_board(solver, typed, **given_options(dict(zip(options, values))))
        return [found, *_opened(task, found)]

    inputs = [board, *options.values()]
    events = ask(solve_typed, inputs, everything, _no_answer, solve, shown, "solve", examples)
    show, opened = (functools.partial(each, task) for each in (_shown, _opened))
    # The timer moves the slider in the browser, and the board follows the slider.
    step.change(show, [boards, which, step], view, show_progress="hidden", **BOARD_EVENT)
    timer.tick(None, [step, last], [step, timer], js=ADVANCE, **PAGE_EVENT)
    for start in (play.click, events[1].then):  # events[1] runs when the tab is first displayed
        start(None, None, [step, timer], js=PLAY, **PAGE_EVENT)
    others = [solve.click, clear.click, step.input, which.input, *(button.click for button, _, _ in examples)]
    gr.on(others, None, None, timer, js=STOP, **PAGE_EVENT)
    which.input(opened, [boards, which], everything[1:], **BOARD_EVENT)
    empty = f"() => Array({task.seq_len}).fill('')" if task.typed_by_cell else "() => ''"
    clear.click(None, None, board, js=empty, **PAGE_EVENT)  # runs in the browser at once, before the user types
    clear.click(_no_answer, None, everything, **BOARD_EVENT)


def _no_answer(words: str = INVITATION) -> list:
    hidden = [gr.Slider(visible=False), gr.Button(visible=False), gr.Radio(visible=False)]
    return [[], *hidden, gr.Textbox("", visible=False), words, "", "", 0]


def _opened(task, found: Sequence[SolvedBoard], name: str = "1") -> list:
    index = int(name) - 1
    last = found[index].last_step
    names = [str(number + 1) for number in range(len(found))]
    return [
        gr.Slider(maximum=last, value=last, visible=True),
        gr.Button(visible=last > 1),
        gr.Radio(choices=names, value=names[index], visible=len(found) > 1),
        gr.Textbox(task.answer_text(found[index].result), visible=True),
        *show_step(task, found[index], last),
        last,
    ]


def _shown(task, found: Sequence[SolvedBoard], name: str | None, number: int):
    return show_step(task, found[int(name or 1) - 1], number) if found else gr.skip()


def _any_example(solver: PuzzleSolvingPipeline, level: int) -> list[str] | str:
    return example(solver, level, time.time_ns() % MAX_EXAMPLE_SEED)


def _board_input(solver: PuzzleSolvingPipeline):
    task = solver.puzzle_task
    first = first_example(solver)
    if task.typed_by_cell:
        return cells_input(task, first, elem_classes="sudoku-input")
    return gr.Textbox(
        first, label="Puzzle", info=task.input_hint, lines=10, max_lines=MOST_LINES, max_length=MAX_PUZZLE_TEXT,
        elem_classes="puzzle-text hrm-mono",
    )  # fmt: skip


def solve_controls(config) -> dict[str, gr.components.Component]:
    """Add a control for each field in `OPTIONS`, with the field's help text, and return the controls by name."""
    usual = {"max_steps": config.halt_max_steps, "noise": 0 if config.draws_random_numbers else DEFAULT_NOISE}
    controls = {}
    with gr.Accordion("Options", open=False):
        for each in (each for each in fields(SolveOptions) if each.name in OPTIONS):
            low, high, step = OPTIONS[each.name] or (0, MAX_SEED, 1)
            shared = {"label": each.name.replace("_", " ").capitalize(), "info": each.metadata["help"]}
            shared["value"] = usual.get(each.name, each.default or 0)
            if get_origin(each.type) is Literal:
                controls[each.name] = gr.Radio(list(get_args(each.type)), **shared)
            elif each.type is bool:
                controls[each.name] = gr.Checkbox(**shared | {"value": each.default})
            elif each.name == "seed":
                controls[each.name] = gr.Number(precision=0, minimum=low, maximum=high, **shared)
            else:
                controls[each.name] = gr.Slider(low, max(high, shared["value"]), step=step, **shared)
    return controls


def given_options(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the values of the controls to pipeline options. Sliders may return integers as floats."""
    whole = {each.name for each in fields(SolveOptions) if each.type in (int, int | None)}
    options = {name: int(value) if name in whole else value for name, value in values.items()}
    if options["restarts"] == 1:
        del options["noise"]
    return options | {"exit_when_still": options["exit_when_still"] or None}


def cells_input(task: PuzzleTask, value: list[str], **options) -> gr.HTML:
    """Return an editable board with arrow-key navigation. Pasting a complete puzzle fills all cells.

    The board's value is a list with the text of each cell, row by row, and "" for a blank. The board is a `gr.HTML`
    instance because Gradio would write a stub file next to the module of a subclass.
    """
    rows, columns = task.grid_shape
    inputs = "".join(
        f'<input class="{" ".join(box_edges(task, row, column))}" inputmode="numeric" autocomplete="off" '
        f'placeholder=" " aria-label="row {row + 1}, column {column + 1}">'
        for row in range(rows)
        for column in range(columns)
    )
    hint = f'<div class="hrm-legend">{html.escape(task.input_hint)}</div>'
    template = f'<div class="hrm-board symbols" style="{board_size(rows, columns)}">{inputs}</div>{hint}'
    return gr.HTML(value, html_template=template, js_on_load=CELLS_SCRIPT, apply_default_css=False, **options)
