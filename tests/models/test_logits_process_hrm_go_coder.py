"""Guards against repeating text. Referees: a search for cycles in complete texts, real code, real plans."""

from pathlib import Path

import pytest
import tiny_go
import torch
from tiny_go import TOKEN_IDS
from transformers import GPT2Config, GPT2LMHeadModel

import hrm_hf
from hrm_hf.golang.data.functions import declarations, parse_file
from hrm_hf.golang.data.plans import derived_steps, doc_plan
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.models.generation_hrm_go_coder import (
    LONGEST_CYCLE,
    DistinctSteps,
    RepetitionGuard,
    longest_stretch,
    repeated_too_often,
    repetition_guards,
)
from hrm_hf.models.processing_hrm_go_coder import SPECIAL_TOKENS, encode_text, plan_segment


STEP, TARGET, END_PLAN, END_CODE = (TOKEN_IDS[tag] for tag in ("<STEP>", "<TARGET:func>", "</PLAN>", "</CODE>"))
TEXT = len(SPECIAL_TOKENS)  # the first id of text


def stretches(ids: list[int]) -> dict[int, int]:
    """Return for each period the length of the longest stretch that repeats with it, including the first copy."""
    found = {}
    for period in range(1, min(LONGEST_CYCLE, len(ids) - 1) + 1):
        run = longest = 0
        for before, token in zip(ids, ids[period:]):
            run = run + 1 if token == before else 0
            longest = max(longest, run)
        found[period] = longest + period
    return found


def goes_in_circles(ids: list[int]) -> bool:
    return any(length > longest_stretch(period) for period, length in stretches(ids).items())


@pytest.mark.parametrize(
    ("period", "longest"), [(1, 24), (2, 128), (3, 128), (7, 128), (16, 128), (40, 240), (64, 384)]
)
def test_a_cycle_is_limited_to_its_longest_stretch(period, longest):
    cycle = list(range(100, 100 + period))
    *ids, following = (cycle * 128)[: longest + 1]
    assert repeated_too_often(ids) == {following} and repeated_too_often([7, *ids[1:]]) == set()
    assert repeated_too_often([*ids, 9]) == set() and not goes_in_circles(ids) and goes_in_circles([*ids, following])


def test_the_guard_prevents_cycles():
    """Without the guard, a model with few preferred successors per token runs in cycles."""
    generator = torch.Generator().manual_seed(0)
    likes = torch.randn(64, 64, generator=generator)
    for guarded in (True, False):
        ids = torch.randint(64, (6, 5), generator=generator)
        guard = RepetitionGuard(prompt_length=5)
        for _ in range(400):
            scores = likes[ids[:, -1]]
            ids = torch.cat([ids, (guard(ids, scores) if guarded else scores).argmax(dim=-1, keepdim=True)], dim=1)
        assert [goes_in_circles(row[5:].tolist()) for row in ids] == [not guarded] * 6


def test_the_guard_ignores_the_prompt_and_its_padding():
    ids, scores = torch.full((1, 50), 9), torch.zeros(1, 16)
    assert torch.equal(RepetitionGuard(prompt_length=40)(ids, scores), scores)
    assert RepetitionGuard(prompt_length=20)(ids, scores)[0].isneginf().nonzero().tolist() == [[9]]


def test_the_only_possible_token_of_a_row_is_kept():
    scores = torch.full((2, 16), -torch.inf)
    scores[:, 9] = 1.0
    scores[1, 3] = 0.0
    found = RepetitionGuard(prompt_length=0)(torch.full((2, 30), 9), scores)
    assert torch.equal(found[0], scores[0]) and found[1].argmax() == 3


FILES = sorted(Path(hrm_hf.__file__).parent.rglob("*.go"))
TABLES = {  # patterns of the most repetitive code in the standard library
    "zeros": "\treturn IP{" + "0, " * 15 + "0}\n",
    "a row of utf8": "\t" + "xx, " * 15 + "xx, // 0x80-0x8F\n",
    "power of ten": "\tx := 10000000000000000000\n",
    "sixes": "\tx := 1.6666666666666667\n",
    "deep": "\n".join("\t" * depth + "if x {" for depth in range(14)) + "\n" * 14,
    "blanks": "\t_, _, _, _, _, _, _, _ = a, a, a, a, a, a, a, a\n",
}  # fmt: skip


@pytest.mark.parametrize(
    "text", [*(file.read_text() for file in FILES), *TABLES.values()], ids=[*(f.stem for f in FILES), *TABLES]
)
def test_real_code_is_never_forbidden(text):
    # A vocabulary of 400 ids has few merges, so repetitions are as long as possible.
    ids = encode_text(tiny_go.tokenizer(), text)
    assert len(FILES) == 3 and not goes_in_circles(ids)


def test_plans_of_real_functions_are_never_forbidden():
    guards, plans = repetition_guards(1), []
    for file in FILES:
        for part in declarations(parse_file(file.read_text())):
            plan = doc_plan(part.doc, part.name, [part.target], derived_steps(part.body))
            plans.append(
                plan_segment(tiny_go.tokenizer(), "ADD", plan["targets"], [step["text"] for step in plan["steps"]])
            )
    assert len(plans) > 15 and max(map(len, map(steps_of, plans))) == 5
    for ids in plans:
        for end in range(1, len(ids)):
            assert guards(torch.tensor([ids[:end]]), torch.zeros(1, tiny_go.VOCAB_SIZE))[0, ids[end]] == 0


def plan(*segments: str) -> list[int]:
    return [token for tag, text in segments for token in (TOKEN_IDS[tag], *encode_text(tiny_go.tokenizer(), text))]


def test_a_step_does_not_repeat_an_earlier_one():
    step, target = "<STEP>", "<TARGET:func>"
    rows = {
        "repeats": [(step, "derived: if"), (step, "return"), (step, "derived: if")],
        "goes on": [(step, "derived: if"), (step, "derived: if x")],
        "begins": [(step, "derived: if"), (step, "derived:")],
        "first": [(step, "derived: if")],
        "a name twice": [(target, "Add"), (target, "Add")],
        "after a target": [(step, "x"), (target, "x"), (step, "x")],
    }
    for name, segments in rows.items():
        ids = torch.tensor([[5, 6, *plan(*segments)]])
        left = DistinctSteps(prompt_length=2)(ids, torch.zeros(1, tiny_go.VOCAB_SIZE))[0].isfinite()
        assert left[TEXT:].all() and left[:TEXT].all() != (name in ("repeats", "after a target")), name
        assert left[:TEXT].any() == left[:TEXT].all()


def circling(model, cycle: dict[int, int]):
    """Make a model prefer a fixed successor for each token of `cycle`, and the cycle's first token after others."""
    likes = torch.zeros(tiny_go.VOCAB_SIZE, dtype=torch.long)
    likes[:] = next(iter(cycle))
    for before, after in cycle.items():
        likes[before] = after
    seen = {}
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(ids=kwargs["input_ids"]), with_kwargs=True
    )

    def follow(module, args, logits):
        liked = likes[seen["ids"][:, -logits.shape[1] :]]
        return logits * 0.01 + torch.nn.functional.one_hot(liked, tiny_go.VOCAB_SIZE) * 10.0

    model.lm_head.register_forward_hook(follow)
    return model


def steps_of(ids: list[int]) -> list[tuple[int, ...]]:
    starts = [index for index, token in enumerate(ids) if token == STEP]
    return [tuple(ids[start:end]) for start, end in zip(starts, [*starts[1:], len(ids)])]


TAB = encode_text(tiny_go.tokenizer(), "\t")[-1]
WORD = encode_text(tiny_go.tokenizer(), "z")[0]


@pytest.mark.parametrize("guarded", [True, False, None])
def test_generation_is_guarded_by_default(guarded):
    """Without guards, the model repeats one step in its plan and then writes tabs until its budget ends."""
    by_config = {} if guarded is None else {"repetition_guard": guarded}
    for fields, options in ((by_config, {}), ({"repetition_guard": not guarded}, {"repetition_guard": guarded})):
        if guarded is None and options:
            continue
        model = circling(tiny_go.model(plan_budget=60, code_budget=60, **fields), {STEP: WORD, WORD: STEP})
        prompt = torch.tensor([tiny_go.task("add")])
        written = model.generate(prompt, do_sample=False, return_plan=True, **options)
        steps = steps_of(written.plan_ids[0])[:-1]  # the last one may be truncated
        assert (len(set(steps)) == len(steps)) == (guarded is not False)
        refined = model.generate_with_refinement(
            ["add"], tokenizer=tiny_go.tokenizer(), max_refinement_iterations=1, do_sample=False, **options
        )
        texts = refined.attempts[0][0].plan["steps"][:-1]
        assert (len(set(texts)) == len(texts)) == (guarded is not False)
        tabs = circling(tiny_go.model(plan_budget=20, code_budget=60, **fields), {TAB: TAB})
        code = tabs.generate(prompt, do_sample=False, **options)[0, prompt.shape[1] :].tolist()
        assert goes_in_circles(code) == (guarded is False) and code.count(TAB) > 20


def test_repetition_guard_is_rejected_for_a_continued_stream():
    model, ids = tiny_go.model(), torch.tensor([[*tiny_go.task("add"), TOKEN_IDS["<PLAN>"], TOKEN_IDS["<CODE>"]]])
    with pytest.raises(ValueError, match="repetition_guard=True"):
        model.generate(ids, repetition_guard=True, max_new_tokens=4)
    assert len(model.generate(ids, repetition_guard=False, max_new_tokens=4)[0]) > len(ids[0])


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("kind", ["coder", "gpt2"])
def test_the_evaluation_writer_guards_any_model(kind, guarded):
    model = tiny_go.model()
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=tiny_go.VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2)).eval()
    writer = Writer(
        circling(model, {TAB: TAB}), tiny_go.tokenizer(), progress=False, max_code_tokens=60, repetition_guard=guarded
    )
    prompts = [tiny_go.builder().prompt_ids(tiny_go.record(0))]
    code = writer.code([[*prompts[0], END_PLAN]], [""])[0]
    assert ("\t" * 25 in code) != guarded and "\t" * 24 in code
