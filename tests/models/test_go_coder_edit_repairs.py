"""`generate_with_refinement` where repairs are edits: scripted edits, verdicts and decisions.

Referees: the stream that the model reads, and for the other mode the code that an earlier version saved.
"""

import pytest
import tiny_go
import torch
from test_go_coder_refinement import BAD, CONTINUE, DONE, GOOD, PROMPTS, REFINE, Validator, decided, decisions, refine
from tiny_go import TOKEN_IDS
from transformers import LogitsProcessor, TextStreamer

from hrm_hf.models.edits_hrm_go_coder import Edit, edit_segment
from hrm_hf.models.processing_hrm_go_coder import Feedback, encode_text


PREFIX = "func Add(a, b int) int {"
FIRST = PREFIX + "\n\treturn a +\n}\n"
RIGHT = PREFIX + "\n\treturn a + b\n}\n"
MEND = [Edit("\treturn a +", "\treturn a + b")]
NOWHERE = [Edit("\treturn c", "")]
EDITS = {TOKEN_IDS["<BEFORE>"], TOKEN_IDS["<AFTER>"]}
SAID = Feedback(False, category="missing operand or type", line=2, message="m")


def scripted(monkeypatch, *written, logits=(CONTINUE,), **fields):
    """A model in edits mode that writes these codes (texts) and lists of edits, or ids, one after the other.

    Returns the model, the streams at its decisions, and for everything it wrote behind <CODE> the prompt and the tags
    that it might use.
    """
    model, read = decided(*logits, **{"repair_mode": "edits", "code_budget": 200, **fields})
    answers, asked, inner = list(written), [], model._continue
    tokenizer = tiny_go.tokenizer()

    def ids_of(answer):
        if isinstance(answer, str):
            return [*encode_text(tokenizer, answer.removeprefix(PREFIX)), TOKEN_IDS["</CODE>"]]
        is_edits = not answer or isinstance(answer[0], Edit)
        return edit_segment(tokenizer, answer)[1:] if is_edits else list(answer)

    def continue_prompts(prompts, settings, budgets, ends, tags, **kwargs):
        if TOKEN_IDS["</CODE>"] not in ends:
            return inner(prompts, settings, budgets, ends, tags, **kwargs)
        width, rows = max(map(len, prompts)), []
        for prompt, budget in zip(prompts, budgets, strict=True):
            asked.append((tokenizer.decode(prompt), tags))
            rows.append(ids_of(answers.pop(0) if len(answers) > 1 else answers[0])[:budget])
        longest = max(map(len, rows))
        return torch.tensor([[0] * width + row + [TOKEN_IDS["<pad>"]] * (longest - len(row)) for row in rows])

    monkeypatch.setattr(model, "_continue", continue_prompts)
    return model, read, asked


def mend(model, validator=None, **options):
    validator = Validator([SAID], [GOOD]) if validator is None else validator
    return refine(model, ["add"], code_prefixes=[PREFIX], validator=validator, **options)


def text(ids) -> str:
    return tiny_go.tokenizer().decode(ids)


def behind_plan(stream: str) -> str:
    return stream.partition("</PLAN>")[2]


# ---- the stream ----


def test_a_repair_is_written_as_edits_and_takes_the_place_of_the_attempt(monkeypatch):
    model, read, asked = scripted(monkeypatch, FIRST, MEND, logits=(CONTINUE, DONE))
    output = mend(model)
    assert output.codes == [RIGHT] and output.stopped == ["done"]
    first, repair = output.attempts[0]
    assert (first.code, first.edits, first.outcome) == (FIRST, None, None)
    assert (repair.code, repair.edits, repair.outcome) == (RIGHT, MEND, "applied")
    verdict = "<VALIDATE><SYNTAX_ERR>missing operand or type, line 2: m\nreturn a +</VALIDATE>"
    assert [behind_plan(prompt) for prompt, _ in asked] == [
        f"<CODE>{PREFIX}", f"<CODE>{FIRST}</CODE>{verdict}<RETRY><CODE>"
    ]  # fmt: skip
    assert [behind_plan(text(ids)) for ids, _ in read] == [f"<CODE>{FIRST}</CODE>", f"<CODE>{RIGHT}</CODE>"]
    assert [tags & EDITS for _, tags in asked] == [set(), EDITS]
    assert repair.new_tokens == len(edit_segment(tiny_go.tokenizer(), MEND)) - 1


def test_what_is_read_before_a_repair_is_what_was_learned(monkeypatch):
    record = tiny_go.record(1, "cd")
    failed, said = record["attempts"][0]["code"], Feedback.of_record(record["attempts"][0]["feedback"])
    model, _, asked = scripted(monkeypatch, failed.removeprefix(record["code_prefix"]), [])
    refine(model, ["add"], code_prefixes=[record["code_prefix"]], validator=Validator([said]))
    learned = tiny_go.builder(repairs="edits").edit_prompt_ids(record)
    assert behind_plan(asked[1][0]) == behind_plan(text(learned)) + "<CODE>"


def test_one_repair_after_the_other_reads_the_last_code_alone(monkeypatch):
    half = [Edit("\treturn a +", "\treturn a + c")]
    model, read, asked = scripted(monkeypatch, FIRST, half, [Edit("\treturn a + c", "\treturn a + b")])
    output = mend(model, Validator([SAID], [SAID], [GOOD]), max_refinement_iterations=3)
    assert output.codes == [RIGHT] and output.stopped == ["iterations"]
    again = behind_plan(asked[2][0])
    assert again.startswith(f"<CODE>{PREFIX}\n\treturn a + c\n}}\n</CODE>") and again.count("<CODE>") == 2
    assert "line 2: m\nreturn a + c</VALIDATE><RETRY><CODE>" in again
    assert [text(ids).count("<CODE>") for ids, _ in read] == [1, 1, 1]


def test_refine_is_followed_by_a_new_plan_and_whole_code(monkeypatch):
    model, _, asked = scripted(monkeypatch, FIRST, RIGHT, [Edit("}", "} //")], logits=(REFINE, CONTINUE, DONE))
    output = mend(model, Validator([GOOD]), max_refinement_iterations=3)
    assert decisions(output) == ["REFINE", "CONTINUE", "DONE"]
    assert [attempt.outcome for attempt in output.attempts[0]] == [None, None, "applied"]
    assert asked[1][0].endswith(f"</PLAN><CODE>{PREFIX}") and asked[1][0].count("<PLAN>") == 2
    assert asked[2][0].count("<PLAN>") == 1 and FIRST not in asked[2][0]  # as learned: one plan, one attempt
    assert f"<PLAN>{output.plans[0][1]}</PLAN><CODE>{RIGHT}</CODE>" in asked[2][0]


def test_a_unified_model_reads_the_quotation_before_it_decides():
    unified = tiny_go.writer(
        bias={**tiny_go.ENDS, "<RETRY>": 30.0}, repair_mode="edits", **tiny_go.VARIANTS["unified"]
    )
    read = []
    unified.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs.get("input_ids")), with_kwargs=True
    )
    line = Feedback(False, category="other", line=1, message="m")
    refine(unified, ["add"], code_prefixes=["func A() {\n"], validator=Validator([line]), max_refinement_iterations=1)
    assert text(read[-1][0].tolist()).endswith("other, line 1: m\nfunc A() {</VALIDATE>")


# ---- outcomes ----


@pytest.mark.parametrize(
    ("written", "outcome"),
    [
        (NOWHERE, "not found"),
        ([*MEND, *MEND], "overlapping"),
        ([Edit(PREFIX, "func Sub() {")], "touches the prefix"),
        ([Edit("}", "}")], "unchanged"),
        ([TOKEN_IDS["</CODE>"]], "unchanged"),
        ([TOKEN_IDS["<BEFORE>"], 100, TOKEN_IDS["</CODE>"]], "malformed"),
        ([TOKEN_IDS["<BEFORE>"], 100, TOKEN_IDS["<AFTER>"], TOKEN_IDS["</s>"]], "malformed"),  # without its end
    ],
)  # fmt: skip
def test_edits_that_change_nothing_keep_code_verdict_and_decision(monkeypatch, written, outcome):
    model, read, asked = scripted(monkeypatch, FIRST, written, MEND, logits=(CONTINUE, DONE))
    validator = Validator([SAID], [GOOD])
    torch.manual_seed(0)
    output = model.generate_with_refinement(
        ["add"], tokenizer=tiny_go.tokenizer(), code_prefixes=[PREFIX], validator=validator, do_sample=True,
        max_refinement_iterations=3,
    )  # fmt: skip
    first, kept, last = output.attempts[0]
    assert kept.outcome == outcome and (kept.edits is None) == (outcome == "malformed")
    assert (kept.code, kept.feedback, kept.decision, kept.plan) == (FIRST, SAID, "CONTINUE", first.plan)
    assert (last.code, last.outcome) == (RIGHT, "applied") and output.iterations == [3]
    assert validator.codes == [[FIRST], [RIGHT]] and len(read) == 2  # neither was asked again
    assert asked[1] == asked[2] and len(output.plans[0]) == 3


def test_without_sampling_edits_that_change_nothing_end_the_row(monkeypatch):
    model, _, asked = scripted(monkeypatch, FIRST, NOWHERE)
    output = mend(model)
    assert output.stopped == ["unchanged"] and output.iterations == [2] and len(asked) == 2
    assert output.codes == [FIRST]


def test_edits_that_are_cut_by_the_budget_are_malformed(monkeypatch):
    model, _, _ = scripted(monkeypatch, FIRST, [Edit("}", "x " * 100)])
    output = mend(model, max_new_tokens=20)
    assert [attempt.outcome for attempt in output.attempts[0]] == [None, "malformed"]
    assert output.attempts[0][1].new_tokens == 20


# ---- a batch, limits, streams ----


def test_rows_that_plan_anew_and_rows_that_edit_share_a_round(monkeypatch):
    model, _, asked = scripted(
        monkeypatch, FIRST, FIRST, RIGHT, MEND, logits=(CONTINUE, REFINE, DONE), max_refinement_iterations=2
    )
    output = refine(model, ["one", "two"], code_prefixes=[PREFIX] * 2, validator=Validator([BAD, GOOD], [GOOD, GOOD]))
    assert [[attempt.outcome for attempt in row] for row in output.attempts] == [[None, "applied"], [None, None]]
    assert output.codes == [RIGHT, RIGHT]
    assert ["<BEFORE>" if tags & {TOKEN_IDS["<BEFORE>"]} else "" for _, tags in asked] == ["", "", "", "<BEFORE>"]


@pytest.mark.parametrize("fields", [{}, tiny_go.VARIANTS["unified"]], ids=["two stacks", "unified"])
def test_a_batch_gets_what_each_prompt_gets_alone(fields):
    bias = {**tiny_go.ENDS, "<BEFORE>": 2.0, "<AFTER>": 2.0}
    model = tiny_go.writer(bias=bias, repair_mode="edits", **fields)

    def validator(codes):
        return [GOOD if sum(map(ord, code)) % 3 == 0 else BAD for code in codes]

    options = {"validator": validator, "refinement_threshold": 0.2}
    together = refine(model, PROMPTS, **options)
    alone = [refine(model, [prompt], **options) for prompt in PROMPTS]
    for name in ("codes", "plans", "iterations", "stopped"):
        assert getattr(together, name) == [getattr(output, name)[0] for output in alone], name
    outcomes = [[attempt.outcome for attempt in row] for row in together.attempts]
    assert outcomes == [[attempt.outcome for attempt in output.attempts[0]] for output in alone]


def test_a_long_stream_never_outgrows_the_model(monkeypatch):
    grown = [Edit("}", "\n".join(f"\tx{number} := {number}" for number in range(4)) + "\n}")]
    model, read, _ = scripted(monkeypatch, FIRST, grown, max_position_embeddings=190)
    output = mend(model, Validator([SAID]))
    assert output.stopped == ["context"] and output.attempts[0][-1].outcome == "applied"
    assert 190 - 60 < max(len(ids) for ids, _ in read) <= 190


def test_a_streamer_gets_the_code_that_edits_made(monkeypatch, capsys):
    model, _, _ = scripted(monkeypatch, FIRST, MEND, logits=(CONTINUE, DONE))
    mend(model, streamer=TextStreamer(tiny_go.tokenizer(), skip_prompt=True))
    assert capsys.readouterr().out == RIGHT.removeprefix(PREFIX) + "\n"


# ---- what is asked of the code ----


class OfCode(LogitsProcessor):
    """Forbids edit marks and </CODE>, as what constrains code may, and notes the streams that it is shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, ids, scores):
        self.shown += [behind_plan(text(row)) for row in ids.tolist()]
        scores[:, [*EDITS, TOKEN_IDS["</CODE>"]]] = -torch.inf
        return scores


@pytest.mark.parametrize("guarded", [True, False])
def test_a_callers_processors_and_criteria_are_of_whole_codes_and_not_of_edits(guarded):
    def written(**options):
        model, _ = decided(CONTINUE, repair_mode="edits", bias={"<BEFORE>": 9.0, "<AFTER>": 8.0, "</CODE>": -2.0})
        inner, edits = model._continue, []

        def note(prompts, settings, budgets, ends, tags, **kwargs):
            ids = inner(prompts, settings, budgets, ends, tags, **kwargs)
            if EDITS <= tags:
                edits.extend(ids[:, max(map(len, prompts)) :].tolist())
            return ids

        model._continue = note
        torch.manual_seed(0)
        model.generate_with_refinement(
            ["add"], tokenizer=tiny_go.tokenizer(), code_prefixes=[PREFIX], validator=Validator([SAID]),
            max_refinement_iterations=2, do_sample=True, repetition_guard=guarded, **options,
        )  # fmt: skip
        return edits

    of_code = OfCode()
    (edits,) = written(logits_processor=[of_code])
    assert TOKEN_IDS["<BEFORE>"] in edits and len(edits) == tiny_go.SHORT["code_budget"]
    assert of_code.shown and not any("<RETRY>" in stream for stream in of_code.shown)
    (stopped,) = written(stopping_criteria=[lambda ids, scores: torch.ones(len(ids), dtype=torch.bool)])
    assert len(stopped) == tiny_go.SHORT["code_budget"]


# ---- the mode ----


def test_the_mode_is_the_configs_unless_one_is_given(monkeypatch):
    for config, asked, edited in (("edits", None, True), ("edits", "rewrite", False), ("rewrite", "edits", True)):
        model, _, prompts = scripted(monkeypatch, FIRST, MEND, repair_mode=config)
        mend(model, repair_mode=asked, max_refinement_iterations=2)
        assert ("\nreturn a +</VALIDATE>" in prompts[1][0]) == edited, config
        assert prompts[1][0].endswith("<RETRY><CODE>" if edited else f"<RETRY><CODE>{PREFIX}")
