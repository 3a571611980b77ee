"""`generate_with_refinement` with scripted validators and decisions. Referee: the streams that the model reads."""

import pytest
import tiny_go
import torch
from tiny_go import SPECIAL_TOKENS, TOKEN_IDS
from transformers import TextStreamer

from hrm_hf.models.generation_hrm_go_coder import IN_PLANS
from hrm_hf.models.processing_hrm_go_coder import DECISIONS, Feedback, parse_plan


PROMPTS = ["return the sum", "// Add2 returns a and b", "func"]
GOOD, BAD = Feedback(True, True, True), Feedback(False, category="unexpected token", line=2, message="found }")
CONTINUE, REFINE, DONE = ([9.0 * (index == decision) for index in range(3)] for decision in range(3))


class Validator:
    """Returns scripted feedback, one list per round; the last round repeats."""

    def __init__(self, *rounds: list[Feedback]):
        self.rounds, self.codes = list(rounds), []

    def __call__(self, codes):
        self.codes.append(list(codes))
        return self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]


def decided(*logits: list[float], **fields):
    """Return a model with scripted decision logits (the last ones repeat), and a list of the streams it reads."""
    model, answers, read = tiny_go.writer(**fields), list(logits), []
    scripted = lambda *features: torch.tensor([[answers.pop(0) if len(answers) > 1 else answers[0]]])  # noqa: E731
    model.model.refinement_head.forward = scripted

    def note(module, args, kwargs):
        if kwargs.get("decision_positions") is not None:
            read.append((kwargs["input_ids"][0].tolist(), kwargs["feedback_ids"][0, 0].tolist()))
            assert kwargs["decision_positions"].item() == kwargs["input_ids"].shape[1] - 1

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    return model, read


def refine(model, prompts="return the sum", **options):
    return model.generate_with_refinement(prompts, tokenizer=tiny_go.tokenizer(), do_sample=False, **options)


def decisions(output) -> list[str]:
    return [attempt.decision for attempt in output.attempts[0]]


def tags(ids) -> str:
    return " ".join(SPECIAL_TOKENS[token] for token in ids if token < len(SPECIAL_TOKENS))


# Stopping


def test_done_stops_immediately():
    output = refine(decided(DONE)[0])
    assert (decisions(output), output.iterations, output.stopped) == (["DONE"], [1], ["done"])
    assert output.attempts[0][0].done_probability > 0.99


def test_a_failing_validator_vetoes_done():
    validator = Validator([BAD], [BAD], [GOOD])
    output = refine(decided(DONE)[0], validator=validator)
    assert output.iterations == [3] and output.stopped == ["done"]
    assert decisions(output)[-1] == "DONE" and "DONE" not in decisions(output)[:2]
    assert [attempt.feedback for attempt in output.attempts[0]] == [BAD, BAD, GOOD]
    assert validator.codes == [[attempt.code] for attempt in output.attempts[0]]


def test_empty_feedback_does_not_veto_done():
    assert refine(decided(DONE)[0], validator=Validator([Feedback()])).iterations == [1]


@pytest.mark.parametrize(("threshold", "stopped"), [(0.79, "done"), (0.81, "iterations"), (None, "iterations")])
def test_refinement_stops_at_the_threshold(threshold, stopped):
    logits = torch.tensor([0.15, 0.05, 0.8]).log().tolist()  # the config's threshold is 0.9
    output = refine(decided(logits)[0], refinement_threshold=threshold)
    assert output.stopped == [stopped] and output.iterations == [1 if stopped == "done" else 5]
    assert output.attempts[0][0].done_probability == pytest.approx(0.8)


@pytest.mark.parametrize(("asked", "config", "expected"), [(None, 3, 3), (2, 5, 2), (1, 5, 1)])
def test_max_refinement_iterations_limits_the_attempts(asked, config, expected):
    model, _ = decided(CONTINUE, max_refinement_iterations=config)
    output = refine(model, max_refinement_iterations=asked)
    assert (output.iterations, output.stopped) == ([expected], ["iterations"])


@pytest.mark.parametrize("decision", [CONTINUE, REFINE], ids=["continue", "refine"])
def test_a_long_stream_drops_its_oldest_attempts_to_fit_the_model(decision):
    model, read = decided(decision, max_position_embeddings=128)
    output = refine(model, validator=Validator([BAD]))
    assert output.iterations == [5] and output.stopped == ["iterations"]
    assert all(len(ids) <= 128 for ids, _ in read)
    for ids, _ in read:  # the task is always kept, and also the previous attempt
        assert tags(ids).startswith("<s> <PROBLEM> </PROBLEM> <PLAN>")
    assert all(2 <= tags(ids).count("<CODE>") <= 4 for ids, _ in read[2:])


def test_a_stream_without_room_for_another_attempt_ends():
    model, _ = decided(CONTINUE, max_position_embeddings=64, plan_budget=8)
    output = refine(model, "return the sum of a and b and of all others", validator=Validator([BAD]))
    assert output.stopped == ["context"] and 1 <= output.iterations[0] < 5


# Streams, plans and code


def test_problems_and_contexts_are_truncated_to_their_budgets():
    model, read = decided(DONE, problem_budget=20, context_budget=40)
    refine(model, "word " * 300, contexts=[("sum.go", "x := 1\n" * 300)])
    ids = read[0][0]
    context = ids.index(TOKEN_IDS["<CONTEXT>"])
    assert ids.index(TOKEN_IDS["</PROBLEM>"]) == context - 1 == 20
    assert ids.index(TOKEN_IDS["</CONTEXT>"]) == context + 39
    named = tiny_go.tokenizer().decode(ids[context : context + 40])
    assert named.startswith("<CONTEXT><FILE>sum.go</FILE>x := 1\n") and named.endswith("1\n</CONTEXT>")


def test_continue_keeps_the_plan_and_refine_writes_a_new_one():
    model, read = decided(CONTINUE, REFINE, DONE)
    output = refine(model, validator=Validator([BAD], [GOOD], [GOOD]))
    assert decisions(output) == ["CONTINUE", "REFINE", "DONE"]
    first, second, third = output.plans[0]
    assert first == second != third
    segments = tags([token for token in read[-1][0] if token not in IN_PLANS])
    assert segments.replace(" ", "") == (
        "<s><PROBLEM></PROBLEM><PLAN></PLAN><CODE></CODE><VALIDATE><SYNTAX_ERR></VALIDATE><RETRY>"
        "<CODE></CODE><VALIDATE><SYNTAX_OK><TEST_PASS></VALIDATE><REFINE><PLAN></PLAN><CODE></CODE>"
    )


def test_the_stream_gets_the_message_and_the_encoder_gets_the_verdict():
    model, read = decided(CONTINUE)
    output = refine(model, validator=Validator([BAD]), max_refinement_iterations=2)
    assert "<VALIDATE><SYNTAX_ERR>unexpected token, line 2: found }</VALIDATE><RETRY><CODE>" in (
        tiny_go.tokenizer().decode(read[1][0])
    )
    lines = output.attempts[0][1].code.count("\n") + 1
    assert read[1][1] == BAD.token_ids(lines)
    assert read[1][0][: len(read[0][0])] == read[0][0]  # the first attempt is still there, word for word


def test_without_a_validator_the_encoder_gets_zeros():
    model, read = decided(DONE)
    refine(model)
    assert read[0][1] == [0, 0, 0, 0]


def test_an_attempt_has_its_code_prefix_and_its_plan():
    model, read = decided(DONE)
    prefix = "func Add2(a, b int) int {\n"
    output = refine(model, ["return the sum"], code_prefixes=[prefix], contexts=[("a.go", "package sum")])
    tokenizer = tiny_go.tokenizer()
    attempt, text = output.attempts[0][0], tokenizer.decode(read[0][0])
    assert output.codes == [attempt.code] and attempt.code.startswith(prefix)
    assert text.startswith("<s><PROBLEM>return the sum</PROBLEM><CONTEXT><FILE>a.go</FILE>package sum</CONTEXT><PLAN>")
    assert text.endswith(f"</PLAN><CODE>{attempt.code}</CODE>")
    assert f"<PLAN>{output.plans[0][0]}</PLAN>" in text
    plan = read[0][0][read[0][0].index(TOKEN_IDS["<PLAN>"]) : read[0][0].index(TOKEN_IDS["</PLAN>"])]
    assert attempt.plan == parse_plan(tokenizer, plan)


def test_the_first_attempt_equals_the_output_of_generate():
    model, _ = decided(DONE)
    tokenizer = tiny_go.tokenizer()
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    output = refine(model, PROMPTS, code_prefixes=PROMPTS, max_new_tokens=12)
    written = model.generate(**batch, do_sample=False, max_new_tokens=12)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in written]
    assert output.codes == texts and all(map(str.startswith, output.codes, PROMPTS))


def test_tags_in_a_prompt_are_text():
    model, read = decided(DONE)
    refine(model, "x</PROBLEM><PLAN><DONE>", code_prefixes=["</CODE>"], contexts=[("<CODE>", "<PLAN>")])
    found = tags(read[0][0]).split(" ")
    assert found[: found.index("<PLAN>")] == "<s> <PROBLEM> </PROBLEM> <CONTEXT> <FILE> </FILE> </CONTEXT>".split()
    assert found[-3:] == ["</PLAN>", "<CODE>", "</CODE>"]


@pytest.mark.parametrize("fields", [{}, tiny_go.VARIANTS["unified"]], ids=["two stacks", "unified"])
def test_a_batch_is_refined_like_each_prompt_alone(fields):
    model = tiny_go.writer(**fields)

    def validator(codes):
        return [GOOD if sum(map(ord, code)) % 3 == 0 else BAD for code in codes]

    options = {"validator": validator, "refinement_threshold": 0.2}
    together = refine(model, PROMPTS, **options)
    alone = [refine(model, [prompt], **options) for prompt in PROMPTS]
    for name in ("codes", "plans", "iterations", "stopped"):
        assert getattr(together, name) == [getattr(output, name)[0] for output in alone], name
    assert [[attempt.decision for attempt in row] for row in together.attempts] == list(map(decisions, alone))


def test_finished_rows_leave_the_batch():
    model, _ = decided(DONE)
    validator = Validator([BAD, GOOD, BAD], [GOOD, BAD], [GOOD])
    output = refine(model, PROMPTS, validator=validator)
    assert output.iterations == [2, 1, 3] and list(map(len, validator.codes)) == [3, 2, 1]


@pytest.mark.parametrize(
    ("verdicts", "chosen"), [((BAD, GOOD, BAD), 1), ((BAD, BAD, BAD), 2), ((GOOD, GOOD, BAD), 1), ((GOOD,), 2)]
)
def test_the_last_attempt_without_a_failure_is_chosen(verdicts, chosen):
    validator = Validator(*([verdict] for verdict in verdicts))
    output = refine(decided(REFINE)[0], validator=validator, max_refinement_iterations=3)
    assert output.codes[0] == output.attempts[0][chosen].code


@pytest.mark.parametrize(("token", "decision"), [("<DONE>", "DONE"), ("<REFINE>", "REFINE"), ("<RETRY>", "CONTINUE")])
def test_a_unified_model_decides_by_its_token(token, decision):
    model = tiny_go.writer(bias={**tiny_go.ENDS, token: 30.0}, **tiny_go.VARIANTS["unified"])
    output = refine(model, max_refinement_iterations=2)
    assert decisions(output)[0] == decision
    assert output.stopped == ["done" if decision == "DONE" else "iterations"]
    if decision != "DONE":
        assert (output.plans[0][0] == output.plans[0][1]) == (decision == "CONTINUE")


def test_plans_and_code_never_contain_decision_tokens():
    everything = dict.fromkeys(SPECIAL_TOKENS[4:], 5.0)
    model = tiny_go.writer(bias=everything)
    model.model.refinement_head.forward = lambda *features: torch.tensor([[REFINE]])
    output = refine(model, max_refinement_iterations=3)
    forbidden = set(SPECIAL_TOKENS) - {"<STEP>"} - {tag for tag in SPECIAL_TOKENS if ":" in tag}
    assert not any(tag in text for text in (*output.plans[0], *output.codes) for tag in forbidden)


def test_sampling_and_beams_reach_every_stage():
    model, _ = decided(REFINE, DONE)
    tokenizer = tiny_go.tokenizer()
    for options in ({"do_sample": True, "temperature": 1.5}, {"do_sample": False, "num_beams": 2}):
        torch.manual_seed(0)
        output = model.generate_with_refinement(["sum"], tokenizer=tokenizer, max_new_tokens=6, **options)
        assert all(attempt.new_tokens <= 7 for attempt in output.attempts[0])  # and </CODE>


# Streaming


class Listener:
    """Streamer that records its texts, and how many validations came before each of them."""

    def __init__(self):
        self.texts, self.open, self.looked = [], False, 0

    def put(self, value):
        if not self.open:
            self.texts.append([])
            self.open = True
        self.texts[-1].append((self.looked, value.flatten().tolist()))

    def end(self):
        self.open = False

    def tokens(self, text: int) -> list[int]:
        return [token for _, part in self.texts[text] for token in part]


@pytest.mark.parametrize("verdict", [GOOD, BAD], ids=["accepted", "refused"])
def test_the_first_attempt_is_streamed_token_by_token_before_validation(verdict):
    listener, prefix = Listener(), "func A() {\n"

    def validator(codes):
        listener.looked += 1
        return [verdict if listener.looked == 1 else GOOD]

    model = decided(REFINE)[0]
    output = refine(
        model, "sum", validator=validator, max_refinement_iterations=2, refinement_threshold=1.0,
        code_prefixes=[prefix], streamer=listener,
    )  # fmt: skip
    attempts, decode = output.attempts[0], tiny_go.tokenizer().decode
    assert attempts[0].code != attempts[1].code == output.codes[0]
    looked, parts = zip(*listener.texts[0])
    assert set(looked) == {0} and decode(parts[0]) == prefix
    assert max(map(len, parts[1:])) == 1 and len(parts) > 5
    assert [decode(listener.tokens(text)) for text in (0, 1)] == [attempt.code for attempt in attempts]
    assert len(listener.texts) == 2 and not listener.open


def test_a_chosen_first_attempt_is_streamed_once_and_ended_once():
    listener = Listener()
    output = refine(decided(DONE)[0], "sum", streamer=listener)
    assert len(listener.texts) == 1 and not listener.open
    assert tiny_go.tokenizer().decode(listener.tokens(0)) == output.codes[0]


def test_beams_stream_only_the_chosen_attempt():
    listener = Listener()
    output = refine(decided(REFINE)[0], "sum", streamer=listener, num_beams=2, max_refinement_iterations=2)
    assert [tiny_go.tokenizer().decode(listener.tokens(0))] == output.codes and len(listener.texts) == 1


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer_prints_the_first_and_the_chosen_attempt(capsys, skip_prompt):
    model, _ = decided(REFINE)
    tokenizer, prefix = tiny_go.tokenizer(), "func A() {\n"
    output = refine(
        model, "sum", validator=Validator([BAD], [GOOD], [BAD]), max_refinement_iterations=3, code_prefixes=[prefix],
        streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt),
    )  # fmt: skip
    assert output.codes[0] == output.attempts[0][1].code
    first, chosen = [attempt.code[len(prefix) * skip_prompt :] for attempt in output.attempts[0][:2]]
    assert capsys.readouterr().out == f"{first}\n{chosen}\n"


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ["a", "b"], "code_prefixes": ["func"]}, "code_prefixes: 1"),
        ({"prompts": ["a"], "contexts": []}, "contexts: 0"),
        ({"prompts": ["a"], "max_refinement_iterations": 0}, "max_refinement_iterations=0"),
        ({"prompts": ["a"], "max_refinement_iterations": 6}, "max_refinement_iterations=6"),
        ({"prompts": ["a", "b"], "streamer": TextStreamer(None)}, "streamer"),
        ({"prompts": ["a", "b"], "validator": lambda codes: [GOOD]}, "validator"),
        ({"prompts": ["a"], "code_prefixes": ["word " * 600]}, "max_position_embeddings"),
    ],
)
def test_bad_arguments_are_rejected_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_go.writer().generate_with_refinement(tokenizer=tiny_go.tokenizer(), **arguments)


def test_a_model_without_tags_cannot_refine():
    with pytest.raises(ValueError, match="tagged=False"):
        refine(tiny_go.writer(tagged=False))


def test_no_prompts_give_no_code():
    assert refine(tiny_go.writer(), []).codes == []


def test_the_decisions_are_named_in_the_order_of_the_classes():
    assert DECISIONS == ("CONTINUE", "REFINE", "DONE")
