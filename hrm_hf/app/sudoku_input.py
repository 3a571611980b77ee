"""A Sudoku board to type into: arrow keys move, and a whole puzzle can be pasted into any cell."""

import gradio as gr

from ..puzzles.tasks import SudokuTask
from .boards import board_size, box_edges


HINT = '<div class="hrm-legend">Type digits (arrow keys move), or paste a whole puzzle into a cell.</div>'
# The template does not depend on the value: an update from the server must not take the focus off a cell.
SCRIPT = """
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


def sudoku_input(task: SudokuTask, value: list[str], **options) -> gr.HTML:
    """An editable board; its value is a list with the text of each cell, row after row, "" for a blank.

    A function, since a subclass of a component has Gradio write a stub file beside its module.
    """
    rows, columns = task.grid_shape
    inputs = "".join(
        f'<input class="{" ".join(box_edges(task, row, column))}" inputmode="numeric" autocomplete="off" '
        f'placeholder=" " aria-label="row {row + 1}, column {column + 1}">'
        for row in range(rows)
        for column in range(columns)
    )
    return gr.HTML(
        value,
        html_template=f'<div class="hrm-board symbols" style="{board_size(rows, columns)}">{inputs}</div>{HINT}',
        js_on_load=SCRIPT,
        apply_default_css=False,
        **options,
    )
