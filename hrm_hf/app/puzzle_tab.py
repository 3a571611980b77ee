"""Tab for a puzzle model: an editable board, the answer after each step, and the model's confidence.

Visitors type a Sudoku into cells, a maze as rows, an ARC task as JSON, and any other puzzle as token ids.
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
from ..puzzles import maze, sudoku_generation
from ..puzzles.options import SolveOptions
from ..puzzles.pipeline import PuzzleSolvingPipeline
from ..puzzles.plots import ARC_COLORS, MAZE_COLORS, changed_cells, used_window, wrong_cells
from ..puzzles.sudoku_rules import BLANK, DIGIT_OFFSET
from ..puzzles.tasks import PuzzleTask, SudokuTask
from .limits import MAX_CELL_TEXT, MAX_PUZZLE_TEXT, MAX_SEED, PAGE_EVENT, ask


OPTIONS = {  # fields of `SolveOptions` that get a control: a slider's (minimum, maximum, step), or None for others
    "max_steps": (1, 1024, 1), "votes": (1, 16, 1), "restarts": (1, 8, 1), "noise": (0, 2, 0.01), "noise_at": None,
    "choose": None, "exit_when_still": (0, 0.1, 0.001), "halt": None, "prefer_valid": None, "seed": None,
}  # fmt: skip
# Legend of a board: the CSS style of each swatch and its meaning. Tasks that are not in LEGENDS use SYMBOLS.
SYMBOLS = {"background: #e3e8ee": "given", "background: #ffffff": "filled in",
           "background: #ffe08a": "changed in this step", "background: #f6b3ab": "breaks a rule"}  # fmt: skip
RINGS = {"box-shadow: inset 0 0 0 2px #f5c518": "changed in this step",
         "box-shadow: inset 0 0 0 2px #e0201b": "breaks a rule"}  # fmt: skip
MAZE_WORDS = ("wall", "open", "S, the start", "G, the goal", "path of the model")  # meanings of MAZE_COLORS[1:]
MAZE_LEGEND = {f"background: {color}": words for color, words in zip(MAZE_COLORS[1:], MAZE_WORDS)}
LEGENDS = {"maze": MAZE_LEGEND | RINGS, "arc": RINGS}
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
SUDOKU_CLUES = {4: (10, 8, 6), 6: (24, 18, 14), 9: (50, 42, 32)}
MAX_EXAMPLE_SEED = 2**31
# ARC task made up for this page: replace color 1 with color 2.
ARC_EXAMPLE = {
    "name": "recolor",
    "train": [
        {"input": [[0, 1, 0], [1, 1, 0], [0, 0, 1]], "output": [[0, 2, 0], [2, 2, 0], [0, 0, 2]]},
        {"input": [[1, 0, 0, 0], [0, 1, 1, 0]], "output": [[2, 0, 0, 0], [0, 2, 2, 0]]},
    ],
    "test": [{"input": [[0, 0, 1], [1, 0, 1], [1, 1, 1]]}],
}
ABOUT = "The model fills in the complete puzzle at once, then revises its answer in each step until it is confident."
INVITATION = "<p>Solve a puzzle to see the answer take shape, step by step.</p>"
HINTS = {
    "maze": "Rows of '#' (wall) and ' ' (open), with one S (start) and one G (goal).",
    "arc": 'A task as JSON: {"name": ..., "train": [{"input", "output"}, ...], "test": [{"input"}, ...]}. '
    "Tasks that the model was not trained on have no row in its puzzle table; expect wrong answers.",
    "generic": "Token ids, separated by spaces.",
}
SUDOKU_HINT = '<div class="hrm-legend">Type digits (arrow keys move), or paste a complete puzzle into a cell.</div>'
# The template does not depend on the value, so a cell keeps the focus when the server updates the value.
SUDOKU_SCRIPT = """
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
    wrong = wrong_cells(task, board.puzzle, tokens) if step else np.zeros(len(tokens), dtype=bool)
    rows, columns = task.grid_shape
    if task.name == "arc":
        rows, columns = used_window(board.states, task.grid_shape)
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
    kind = "colors" if task.name in LEGENDS else "symbols"
    grid = f'<div class="hrm-board {kind}" style="{board_size(rows, columns)}">{"".join(cells)}</div>'
    return f'<div data-step="{step}">{grid}{_legend(task.name)}</div>'


def board_size(rows: int, columns: int) -> str:
    """Return CSS variables for the size of a board's cells, which shrink on a narrow page."""
    return f"--columns: {columns}; --most: {min(MAX_CELL, BOARD_PIXELS // max(rows, columns))}px"


def box_edges(task: PuzzleTask, row: int, column: int) -> list[str]:
    """Return the CSS classes of a cell that borders another Sudoku box to its right or below it."""
    if task.name != "sudoku":
        return []
    (box_rows, box_columns), (rows, columns) = task.board.box_shape, task.grid_shape
    right = (column + 1) % box_columns == 0 and column + 1 < columns
    bottom = (row + 1) % box_rows == 0 and row + 1 < rows
    return ["box-right"] * right + ["box-bottom"] * bottom


def _cell(task: PuzzleTask, given: bool, token: int) -> tuple[str, str, list[str]]:
    """Return the text, CSS style and CSS classes of a cell."""
    if task.name == "maze":
        letter = {maze.START: "S", maze.GOAL: "G"}.get(token, "")
        return letter, f"background: {MAZE_COLORS[min(token, maze.VOCAB_SIZE - 1)]}", []
    if task.name == "arc":
        return "", f"background: {ARC_COLORS[token if token < len(ARC_COLORS) else 0]}", []
    if task.name == "sudoku":
        digit = str(token - DIGIT_OFFSET) if BLANK < token < task.board.vocab_size else ""
        return digit, "", ["given" if given else "filled"]
    return str(token), "", ["filled"]


def _legend(task_name: str) -> str:
    marks = LEGENDS.get(task_name, SYMBOLS)
    items = "".join(f'<span><i style="{style}"></i>{words}</span>' for style, words in marks.items())
    return f'<div class="hrm-legend">{items}</div>'


def caption(task: PuzzleTask, board: SolvedBoard, step: int) -> str:
    """Return the Markdown caption of a step, with the confidence and the rules that the answer breaks."""
    if not step:
        return "**The puzzle**, before the first step."
    parts = [f"**Step {step} of {board.last_step}**", f"confidence {board.confidences[step - 1]:.3f}"]
    problems = task.violations(board.puzzle, board.states[step])
    if task.has_rules and not problems:
        parts.append("a valid grid" if task.name == "arc" else "obeys the rules")
    if step == board.last_step:
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
    """Convert typed text to the pipeline's input format. A Sudoku is a list of cells or one string."""
    name = solver.puzzle_task.name
    if name == "sudoku" and isinstance(value, str):
        if len(value) > MAX_PUZZLE_TEXT:
            raise ValueError(f"the board has {len(value):,} characters; the limit is {MAX_PUZZLE_TEXT:,}")
        return value
    if name == "sudoku":
        cells = solver.puzzle_task.seq_len
        if not isinstance(value, list) or len(value) != cells or not all(isinstance(cell, str) for cell in value):
            raise ValueError(
                f"the board must be a string, or a list of {cells} strings (one per cell), not {type(value).__name__}"
            )
        if (longest := max(map(len, value))) > MAX_CELL_TEXT:
            raise ValueError(f"a cell of the board has {longest:,} characters; expected a digit")
        return [_digit(cell, solver.puzzle_task.board.name(index)) for index, cell in enumerate(value)]
    if name == "maze":
        return value
    if name == "arc":
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"the task is not valid JSON: {error.msg} at line {error.lineno}") from error
        except RecursionError as error:
            raise ValueError("the task is not an ARC task: its lists are nested too deeply") from error
    words = value.split()
    for word in words:
        if not word.isdecimal():
            raise ValueError(f"{word!r:.40} is not a token id; expected {solver.puzzle_task.seq_len} numbers")
    return [int(word) for word in words]


def _digit(cell: str, place: str) -> int | str:
    """Convert a cell to an int if it is a number, since the pipeline reads a string of several digits as a row."""
    cell = cell.strip() or "."
    if cell.isascii() and cell.isdigit():
        return int(cell)
    if len(cell) > 1:
        raise ValueError(f"{place}: {cell!r:.40} is not a digit")
    return cell


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


def answer_text(task_name: str, result: dict[str, Any]) -> str:
    """Return the answer as text, in the same format as a typed puzzle."""
    if task_name == "sudoku":
        return "\n".join("".join(map(str, row)) for row in result["grid"])
    return result["text"]


def typed_value(solver: PuzzleSolvingPipeline, tokens: np.ndarray) -> list[str] | str:
    """Convert tokens [S] to typed text. This is the inverse of `read_board` for all tasks except ARC."""
    task = solver.puzzle_task
    if task.name == "sudoku":
        return [str(digit) if digit else "" for row in task.grid(tokens) for digit in row]
    return task.text(tokens)


def example(solver: PuzzleSolvingPipeline, level: int, seed: int) -> list[str] | str:
    """Return an example puzzle generated from a seed. Level 0 is easy, level 2 is hard."""
    task = solver.puzzle_task
    if task.name == "arc":
        return json.dumps(ARC_EXAMPLE)
    if task.name == "sudoku":
        clues = SUDOKU_CLUES[task.board.size][level]
        board, _ = next(sudoku_generation.generate(task.board.size, 1, clues, seed))
        return ["" if digit == 0 else str(digit) for digit in board.tolist()]
    if task.name == "maze":
        rows, columns = task.grid_shape
        length = (rows + columns) * level // 4 + 1
        board, _ = next(maze.generate(rows, columns, 1, seed, min_path_length=length))
        return typed_value(solver, board.reshape(-1))
    return typed_value(solver, np.random.default_rng(seed).integers(0, task.vocab_size, task.seq_len))


def first_example(solver: PuzzleSolvingPipeline) -> list[str] | str:
    """Of three examples, return the hardest one that the model answers validly, or the easiest if there is none."""
    for level in (2, 1):
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
    """Add the components and events for a model, and run the example when the tab is first displayed."""
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
                    for level, name in enumerate(["Example"] if task.name in ("arc", "generic") else names)
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
    empty = f"() => Array({task.seq_len}).fill('')" if task.name == "sudoku" else "() => ''"
    clear.click(None, None, board, js=empty, **PAGE_EVENT)  # clears in the browser at once, before anybody types
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
        gr.Textbox(answer_text(task.name, found[index].result), visible=True),
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
    if task.name == "sudoku":
        return sudoku_input(task, first, elem_classes="sudoku-input")
    return gr.Textbox(
        first, label="Puzzle", info=HINTS[task.name], lines=10, max_lines=MOST_LINES, max_length=MAX_PUZZLE_TEXT,
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


def sudoku_input(task: SudokuTask, value: list[str], **options) -> gr.HTML:
    """Return an editable Sudoku board with arrow-key navigation. Pasting a complete puzzle fills all cells.

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
    template = f'<div class="hrm-board symbols" style="{board_size(rows, columns)}">{inputs}</div>{SUDOKU_HINT}'
    return gr.HTML(value, html_template=template, js_on_load=SUDOKU_SCRIPT, apply_default_css=False, **options)
