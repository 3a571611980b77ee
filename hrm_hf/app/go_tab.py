"""Tab for a Go coder. It shows the plan, the attempt, the verdict and the repair in sequence."""

import functools
import html
from typing import Any

import gradio as gr

from ..golang.generate import tasks_of, write_tasks
from ..golang.options import WriteGo
from ..golang.validators.go_validators import VALIDATOR_CHOICES, best_validator
from ..io.usage import install_command
from ..models.processing_hrm_go_coder import Feedback
from ..models.refinement_hrm_go_coder import Attempt, RefinementOutput
from .limits import MAX_SEED, MAX_TEXT, ask


EXAMPLES = (
    ("Abs", "Abs returns the absolute value of x.", "func Abs(x int) int {"),
    ("IsEmpty", "IsEmpty reports whether the stack has no elements.", "func (s *Stack) IsEmpty() bool {"),
    ("Max", "Max returns the larger of a and b.", "func Max(a, b int) int {"),
)
STOPPED = {"done": "the model is done", "iterations": "no attempts left", "context": "the stream is full"}


@functools.cache
def validator_of(kind: str) -> tuple[Any, str]:
    """Return the validator called `kind` and its description. "auto" tries go/parser, then tree-sitter, then none."""
    if kind == "none":
        return None, "No validator: the model alone decides."
    try:
        found = best_validator(kind)
    except ImportError:  # tree-sitter, the fallback of "auto", is missing
        if kind != "auto":
            raise
        return None, f"Neither Go nor tree-sitter is installed; the syntax is not checked ({install_command('go')})."
    return found, f"Validator: {found.title}."


def attempts_html(result: RefinementOutput) -> str:
    """Return the attempts as HTML cards: plan, code with the error marked, verdict and decision."""
    attempts = result.attempts[0]
    repeats = [index > 0 and attempt.plan == attempts[index - 1].plan for index, attempt in enumerate(attempts)]
    cards = [_card(number, *pair) for number, pair in enumerate(zip(attempts, repeats), start=1)]
    words = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
    return "".join(cards) + f"<p>{words}; {STOPPED[result.stopped[0]]}.</p>"


def _card(number: int, attempt: Attempt, same_plan: bool) -> str:
    plan, feedback = attempt.plan, attempt.feedback
    verdict, state = verdict_of(feedback)
    badge = {"passed": "good", "failed": "bad"}.get(state, "")
    steps = "".join(f"<li>{html.escape(step)}</li>" for step in plan["steps"])
    aim = " ".join([plan["intent"] or "", ", ".join(plan["targets"])]).strip() or "no intent and no target"
    thought = "<div>as before</div>" if same_plan else f"<div>{html.escape(aim)}</div><ul>{steps}</ul>"
    return (
        f'<div class="hrm-attempt {state}"><h4>Attempt {number}{": repair" if number > 1 else ""}</h4>'
        f"<h5>Plan</h5>{thought}<h5>Code</h5><pre>{_code(attempt.code, feedback)}</pre>"
        f'<h5>Verdict</h5><div><span class="hrm-badge {badge}">{state or "not checked"}</span> '
        f"{html.escape(verdict)}</div><h5>Decision</h5><div>{attempt.decision}, "
        f"P(DONE) {attempt.done_probability:.2f}</div></div>"
    )


def verdict_of(feedback: Feedback | None) -> tuple[str, str]:
    """Return the validator's message and a state: "passed", "failed" or "" (not checked)."""
    if feedback is None:
        return "no validator was used", ""
    if not feedback.failed:
        looked = feedback.syntax_ok is not None
        return ("no errors" if looked else feedback.message or "not checked"), "passed" if looked else ""
    where = "" if feedback.line is None else f", line {feedback.line}"
    return f"{feedback.category}{where}: {feedback.message}", "failed"


def _code(code: str, feedback: Feedback | None) -> str:
    lines = [html.escape(line) for line in code.split("\n")]
    if feedback is not None and feedback.failed and feedback.line is not None and feedback.line <= len(lines):
        lines[feedback.line - 1] = f'<span class="bad-line">{lines[feedback.line - 1] or " "}</span>'
    return "\n".join(lines)


def go_tab(coder, tokenizer, shown: gr.State) -> None:
    """Build the tab that writes Go code. Its example runs when the tab is first displayed."""
    config = coder.config
    with gr.Row():
        with gr.Column(scale=4, min_width=340):
            task = gr.Textbox(EXAMPLES[0][1], label="Task", info="What the code does.", lines=3, max_length=MAX_TEXT)
            signature = gr.Textbox(
                EXAMPLES[0][2], label="Signature", info="How the code begins; may be empty.", max_length=MAX_TEXT
            )
            start = gr.Button("Write", variant="primary")
            with gr.Row():
                examples = [
                    (gr.Button(name, size="sm", min_width=60), lambda given=given: given, [task, signature])
                    for name, *given in EXAMPLES
                ]
            with gr.Accordion("Options", open=False):
                with gr.Row():
                    kind = gr.Dropdown([*VALIDATOR_CHOICES, "none"], label="Validator")
                    attempts = gr.Slider(1, 5, value=config.max_refinement_iterations, step=1, label="Max. attempts")
                with gr.Row():
                    threshold = gr.Slider(0, 1, value=config.refinement_threshold, label="Minimum P(DONE) to stop")
                    budget = gr.Slider(16, config.code_budget, value=config.code_budget, step=1, label="New tokens")
                with gr.Row():
                    temperature = gr.Slider(0, 2, value=0, step=0.05, label="Temperature", info="0: greedy.")
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MAX_SEED)
        with gr.Column(scale=6, min_width=420):
            note = gr.Markdown()
            cards = gr.HTML("<p>Plan, attempt, verdict and repair appear here.</p>", elem_classes="shown-attempts")
            chosen = gr.Code(label="Chosen attempt", language=None, lines=3, visible=False)

    def show(text, begins, kind, attempts, threshold, budget, temperature, seed):
        validator, words = validator_of(kind)
        if not text.strip():
            raise ValueError("task='': must not be empty; describe what the code should do")
        options = WriteGo(
            model="", prompts=[text], prefix=[begins], max_iterations=int(attempts), threshold=threshold,
            max_new_tokens=int(budget), temperature=temperature, seed=int(seed),
        )  # fmt: skip
        result = write_tasks(coder, tokenizer, validator, options, tasks_of(options))
        return words, attempts_html(result), gr.Code(result.codes[0], visible=True)

    def refused(words):
        return ["", words, gr.Code("", visible=False)]

    controls = [task, signature, kind, attempts, threshold, budget, temperature, seed]
    ask(show, controls, [note, cards, chosen], refused, start, shown, "write_go", examples)
