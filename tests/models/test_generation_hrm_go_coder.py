"""`generate` of the Go coder. Referees: logits of the complete hidden stream, transformers' generate, other caches."""

import os
import subprocess
import sys

import pytest
import tiny_go
import torch
from tiny_go import TOKEN_IDS
from tolerances import assert_equal_but_for_rounding
from transformers import CompileConfig, GenerationMixin, TextStreamer, pipeline

from hrm_hf.models.generation_hrm_go_coder import RowLimits
from hrm_hf.models.processing_hrm_go_coder import INTENTS, SPECIAL_TOKENS, TARGET_KINDS, encode_text


PROMPTS = ["func Add1(a, b int) int {", "// Add2 returns the sum of a and b.\nfunc Add2(a,", "func main() {\n"]
SHAPES = {name: tiny_go.VARIANTS[name] for name in ("two stacks", "cycles", "unified")}
each_shape = pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES.keys())
BOS, EOS, PAD = (TOKEN_IDS[token] for token in ("<s>", "</s>", "<pad>"))
IN_CODE = {TOKEN_IDS["</CODE>"], EOS}
IN_PLAN = {TOKEN_IDS[tag] for tag in ("</PLAN>", "</s>", "<STEP>")}
IN_PLAN |= {TOKEN_IDS[f"<INTENT:{intent}>"] for intent in INTENTS} | {TOKEN_IDS[f"<TARGET:{k}>"] for k in TARGET_KINDS}
GREEDY = {"do_sample": False, "max_new_tokens": 20}


def encoded(texts, **kwargs):
    return tiny_go.tokenizer()(texts, padding=True, return_tensors="pt", return_token_type_ids=False, **kwargs)


def without_end(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token not in (EOS, PAD)]


def continuations(model, batch, **kwargs) -> list[list[int]]:
    sequences = model.generate(**batch, **{**GREEDY, **kwargs})
    return [without_end(row) for row in sequences[:, batch["input_ids"].shape[1] :]]


def assert_most_likely(model, stream: list[int], start: int, tags: set[int]) -> None:
    """Check that every token from `start` on has the largest logit among text and `tags`."""
    logits = model(torch.tensor([stream]), use_cache=False).logits[0]
    hidden = [token for token in range(len(SPECIAL_TOKENS)) if token not in tags]
    logits[:, hidden] = -torch.inf
    assert logits[start - 1 : -1].argmax(dim=-1).tolist() == stream[start:]


# Output


@each_shape
def test_a_plain_prompt_returns_with_its_continuation_but_no_plan_or_tags(fields):
    model, batch = tiny_go.writer(bias={"</PLAN>": 1.5, "</CODE>": 4.0}, **fields), encoded(PROMPTS)
    sequences = model.generate(**batch, **GREEDY)
    width = batch["input_ids"].shape[1]
    assert torch.equal(sequences[:, :width], batch["input_ids"])
    new = sequences[:, width:]
    assert set(new[new < len(SPECIAL_TOKENS)].tolist()) <= {EOS, PAD}
    ends = [(row == EOS).nonzero()[:, 0].tolist() for row in new]
    assert sum(map(len, ends)) > 0  # some row closes its code, which ends the sequence
    assert all((row[end[0] + 1 :] == PAD).all() for row, end in zip(new, ends) if end)


@each_shape
def test_greedy_search_writes_the_likeliest_plan_then_the_likeliest_code(fields):
    model = tiny_go.writer(**fields)
    for prompt in PROMPTS:
        batch = encoded([prompt])
        output = model.generate(**batch, **GREEDY, return_plan=True)
        text = encode_text(tiny_go.tokenizer(), prompt)
        front = [BOS, TOKEN_IDS["<PROBLEM>"], *text, TOKEN_IDS["</PROBLEM>"], TOKEN_IDS["<PLAN>"]]
        plan = output.plan_ids[0]
        closed = len(plan) < model.config.plan_budget
        assert_most_likely(model, [*front, *plan, *[TOKEN_IDS["</PLAN>"]] * closed], len(front), IN_PLAN)
        front += [*plan, TOKEN_IDS["</PLAN>"], TOKEN_IDS["<CODE>"], *text]
        code = output.sequences[0, batch["input_ids"].shape[1] :].tolist()
        code = [TOKEN_IDS["</CODE>"] if token == EOS else token for token in code]
        assert_most_likely(model, [*front, *code], len(front), IN_CODE)


@each_shape
def test_a_batch_generates_the_same_as_each_prompt_alone(fields):
    model = tiny_go.writer(**fields)
    alone = [continuations(model, encoded([prompt]))[0] for prompt in PROMPTS]
    assert continuations(model, encoded(PROMPTS)) == alone
    assert len(set(map(tuple, alone))) == 3


def test_prompts_need_neither_attention_mask_nor_bos():
    model = tiny_go.writer()
    batch = encoded(PROMPTS[:1])
    expected = continuations(model, batch)
    bare = batch["input_ids"][:, 1:]
    assert model.generate(bare, **GREEDY)[0, bare.shape[1] :].tolist()[: len(expected[0])] == expected[0]


@each_shape
def test_every_kind_of_cache_generates_the_same(fields):
    model, batch = tiny_go.writer(**fields), encoded(PROMPTS)
    expected = continuations(model, batch)
    assert continuations(model, batch, use_cache=False) == expected
    assert continuations(model, batch, cache_implementation="static", disable_compile=True) == expected
    assert continuations(model, batch, prefill_chunk_size=5) == expected


@pytest.mark.parametrize("fields", [SHAPES["two stacks"], SHAPES["unified"]], ids=["two stacks", "unified"])
def test_plan_and_code_compile_to_one_step_each_for_any_prompt(fields):
    """The "eager" backend traces graphs like a compiler, but runs them with torch's own kernels."""
    model = tiny_go.writer(**fields)
    settings = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode="default")
    settings._compile_all_devices = True  # by default, transformers only compiles on GPUs
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for prompt in PROMPTS:
        batch = encoded([prompt])
        found = continuations(model, batch, cache_implementation="static", compile_config=settings)
        assert found == continuations(model, batch)
        assert graphs["unique_graphs"] == before + 2


@each_shape
def test_assisted_generation_gives_the_same_output(fields):
    model, batch = tiny_go.writer(**fields), encoded(PROMPTS[:1])
    expected = continuations(model, batch)
    assert continuations(model, batch, prompt_lookup_num_tokens=3) == expected
    assistant = tiny_go.writer(seed=6)
    assert continuations(model, batch, assistant_model=assistant) == expected


@each_shape
def test_beam_search_is_the_same_with_and_without_a_cache(fields):
    model, batch = tiny_go.writer(**fields), encoded(PROMPTS)
    search = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "do_sample": False}
    found = [model.generate(**batch, **search, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*found) and len(found[0]) == 6
    prompts = batch["input_ids"].repeat_interleave(2, dim=0)
    assert torch.equal(found[0][:, : prompts.shape[1]], prompts)
    assert not any(torch.equal(found[0][2 * row], found[0][2 * row + 1]) for row in range(3))


def test_samples_of_one_prompt_have_their_own_plans():
    model, batch = tiny_go.writer(), encoded(PROMPTS[:2])
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(
            model.generate(**batch, do_sample=True, num_return_sequences=3, max_new_tokens=6, return_plan=True)
        )
    assert torch.equal(outputs[0].sequences, outputs[1].sequences) and len(outputs[0].sequences) == 6
    assert len(set(map(tuple, outputs[0].plan_ids))) == 6
    width = batch["input_ids"].shape[1]
    assert torch.equal(outputs[0].sequences[:, :width], batch["input_ids"].repeat_interleave(3, dim=0))


SCORED = {"return_dict_in_generate": True, "output_scores": True}


def hidden_log_probabilities(model, output, row: int) -> torch.Tensor:
    """Return the log probabilities of a row's generated tokens, from one forward on the complete stream."""
    stream = output.streams[row][output.streams[row] != PAD]
    logits = model(stream[None], use_cache=False).logits[0]
    logits[:, [token for token in range(len(SPECIAL_TOKENS)) if token not in IN_CODE]] = -torch.inf
    chosen = logits[:-1].log_softmax(dim=-1).gather(1, stream[1:, None])[:, 0]
    return chosen[(stream == TOKEN_IDS["<CODE>"]).nonzero()[-1] :]


@each_shape
@pytest.mark.parametrize(
    "choice", [{}, {"do_sample": True, "num_return_sequences": 2, "top_k": 0}], ids=["greedy", "samples"]
)
def test_transition_scores_are_the_log_probabilities_of_the_hidden_stream(choice, fields):
    model, batch = tiny_go.writer(bias={"</PLAN>": 1.5, "</CODE>": 4.0}, **fields), encoded(PROMPTS)
    output = model.generate(**batch, **GREEDY | choice, **SCORED)
    assert (output.streams == TOKEN_IDS["</CODE>"]).any()  # output as </s>, whose score differs
    found = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    width = batch["input_ids"].shape[1]
    assert found.shape == output.sequences[:, width:].shape and len(output.plan_ids) == len(found)
    for row, scores in enumerate(found):
        code = output.sequences[row, width:]
        expected = hidden_log_probabilities(model, output, row)
        given = len(without_end(batch["input_ids"][row * len(PROMPTS) // len(found)])) - 1  # less <s>
        assert_equal_but_for_rounding(scores[code != PAD], expected[given:])


@each_shape
def test_transition_scores_of_beams_add_up_to_the_scores_of_the_sequences(fields):
    model, batch = tiny_go.writer(bias={"</PLAN>": 1.5, "</CODE>": 6.0}, **fields), encoded(PROMPTS)
    search = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.0, "do_sample": False}
    output = model.generate(**batch, **search, max_new_tokens=6, **SCORED)
    assert (output.streams == TOKEN_IDS["</CODE>"]).any()
    found = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    lengths = (output.beam_indices >= 0).sum(dim=1)
    assert_equal_but_for_rounding(found.sum(dim=1) / lengths, output.sequences_scores)


# Criteria, processors and prefix functions of callers, which see the visible prompt and the code


def test_criteria_processors_and_allowed_tokens_see_the_visible_text():
    model, batch, seen = tiny_go.writer(bias={}), encoded(PROMPTS), []

    def note(ids, scores):
        seen.append(ids)
        return scores

    def stop(ids, scores, **kwargs):
        seen.append(ids)
        return torch.full((len(ids),), ids.shape[1] >= batch["input_ids"].shape[1] + 5)

    sequences = model.generate(**batch, **GREEDY, stopping_criteria=[stop], logits_processor=[note])
    assert sequences.shape[1] == batch["input_ids"].shape[1] + 5 and len(seen) == 2 * 5
    assert all(torch.equal(ids, sequences[:, : ids.shape[1]]) for ids in seen)

    rows = []
    model.generate(
        **batch,
        **GREEDY | {"max_new_tokens": 2},
        prefix_allowed_tokens_fn=lambda row, ids: rows.append(ids) or [70, 71],
    )
    assert [torch.equal(ids, batch["input_ids"][row]) for row, ids in enumerate(rows[:3])] == [True] * 3


def test_criteria_see_every_beam_and_sample_and_may_be_given_by_position():
    model, batch, shapes = tiny_go.writer(bias={}), encoded(PROMPTS), []
    width = batch["input_ids"].shape[1]

    def stop(ids, scores, **kwargs):
        shapes.append(tuple(ids.shape))
        assert all(any(torch.equal(row, prompt) for prompt in batch["input_ids"]) for row in ids[:, :width])
        return torch.full((len(ids),), ids.shape[1] >= width + 4)

    mask = {"attention_mask": batch["attention_mask"]}
    for options, rows in (({"num_beams": 3}, 9), ({"do_sample": True, "num_return_sequences": 2}, 6)):
        model.generate(batch["input_ids"], None, None, [stop], **mask, **GREEDY | options)
        assert shapes[-1][1] == width + 4 and shapes[-1][0] % rows == 0


def test_eos_token_id_ends_the_code():
    model, batch = tiny_go.writer(bias={}), encoded(PROMPTS[:1])
    written = continuations(model, batch)[0]
    last = next(token for token in written if token not in written[: written.index(token)] and token != written[0])
    ended = continuations(model, batch, eos_token_id=last)[0]
    assert ended == written[: written.index(last) + 1]


def test_embeddings_are_continued_without_a_plan_but_with_a_warning(caplog):
    model, ids = tiny_go.writer(), encoded(PROMPTS[:1])["input_ids"]
    embeddings = {"inputs_embeds": model.get_input_embeddings()(ids)}
    for given in ({}, {"input_ids": ids}):
        expected = GenerationMixin.generate(model, **given, **embeddings, **GREEDY)
        assert not caplog.records
        assert torch.equal(model.generate(**given, **embeddings, **GREEDY), expected)
        assert "inputs_embeds" in caplog.text
        caplog.clear()
    model.generate(**embeddings, **GREEDY, plan_first=False)
    assert not caplog.records


# Kinds of prompts


@pytest.mark.parametrize("context", ["", "package sum"])
def test_a_task_gets_code_from_its_beginning(context):
    model, ids = tiny_go.writer(), torch.tensor([tiny_go.task("return the sum", context)])
    output = model.generate(ids, **GREEDY, return_plan=True)
    front = [*ids[0].tolist(), TOKEN_IDS["<PLAN>"], *output.plan_ids[0], TOKEN_IDS["</PLAN>"], TOKEN_IDS["<CODE>"]]
    code = [TOKEN_IDS["</CODE>"] if token == EOS else token for token in output.sequences[0, ids.shape[1] :].tolist()]
    assert_most_likely(model, [*front, *code], len(front), IN_CODE)


def test_a_task_may_end_with_the_plan_opener():
    model, ids = tiny_go.writer(), tiny_go.task("return the sum")
    with_opener = {"input_ids": torch.tensor([[*ids, TOKEN_IDS["<PLAN>"]]])}
    assert continuations(model, with_opener) == continuations(model, {"input_ids": torch.tensor([ids])})


def test_the_originals_prompts_are_tasks():
    model, batch = tiny_go.writer(), encoded(["<PR_TITLE> Fix sum\n<PR_BODY>"])
    assert batch["input_ids"][0, 1] == TOKEN_IDS["<PR_TITLE>"]
    assert continuations(model, batch) == continuations(
        model, {"input_ids": torch.tensor([tiny_go.task(" Fix sum\n")])}
    )


STREAM = "<s> <PROBLEM> 5 </PROBLEM> <PLAN> <INTENT:ADD> 3"


@pytest.mark.parametrize("pattern", [STREAM, f"{STREAM} </PLAN> <CODE> 4", "<s> <PROBLEM> 4", "<s> <PLAN>"])
def test_a_tagged_stream_is_continued_unchanged(pattern):
    model, ids = tiny_go.writer(), torch.tensor([tiny_go.stream(pattern)])
    assert torch.equal(model.generate(ids, **GREEDY), GenerationMixin.generate(model, ids, **GREEDY))


def test_plan_first_false_and_untagged_models_skip_the_plan():
    ids = encoded(PROMPTS[:1])["input_ids"]
    for model, options in ((tiny_go.writer(), {"plan_first": False}), (tiny_go.writer(tagged=False), {})):
        assert torch.equal(model.generate(ids, **options, **GREEDY), GenerationMixin.generate(model, ids, **GREEDY))


def test_streams_and_prompts_in_one_batch_are_rejected():
    batch = encoded([PROMPTS[0], "<PROBLEM>x</PROBLEM><PLAN><STEP>"])
    with pytest.raises(ValueError, match="prompt 1"):
        tiny_go.writer().generate(**batch, **GREEDY)


# Lengths


def test_max_new_tokens_counts_only_code_and_max_length_adds_the_visible_prompt():
    model, batch = tiny_go.writer(bias={}), encoded(PROMPTS[:1])
    width = batch["input_ids"].shape[1]
    lengths = [
        model.generate(**batch, do_sample=False, **limit).shape[1] - width
        for limit in ({"max_new_tokens": 7}, {"max_length": width + 9}, {})
    ]
    assert lengths == [7, 9, model.config.code_budget]


def test_prompts_without_room_are_rejected_and_outputs_are_cut_with_a_warning(caplog):
    model = tiny_go.writer(bias={}, max_position_embeddings=64)
    with pytest.raises(ValueError, match="64 positions"):
        model.generate(torch.full((1, 62), 100), **GREEDY)
    ids = torch.full((1, 15), 100)  # the stream has the prompt twice, up to 16 plan tokens, and 6 tags
    output = model.generate(ids, do_sample=False, max_new_tokens=60, return_plan=True)
    room = 64 - (2 * 15 + len(output.plan_ids[0]) + 6)
    assert output.sequences.shape[1] - 15 == room
    assert "max_new_tokens=60" in caplog.text and f"at most {room} " in caplog.text
    caplog.clear()
    for fitting in ({"max_new_tokens": room}, {}):  # without a given length, use what fits
        assert model.generate(ids, do_sample=False, **fitting).shape[1] - 15 == room and not caplog.records


def test_a_plan_leaves_room_for_code():
    model = tiny_go.writer(bias={}, max_position_embeddings=64, plan_budget=60)
    assert model.generate(torch.full((1, 8), 100), **GREEDY).shape[1] >= 8 + 16


def test_limits_apply_to_rows_and_all_their_beams():
    limits = RowLimits([4, 6])
    assert limits(torch.zeros(2, 5), None).tolist() == [True, False]
    assert limits(torch.zeros(6, 5), None).tolist() == [True] * 3 + [False] * 3


def test_a_long_prompt_does_not_shorten_other_outputs():
    texts = ["x", "func Add1(a, b int) int { return a + b }"]
    model = tiny_go.writer(bias={}, max_position_embeddings=64, plan_budget=8, code_budget=44)
    for options in ({}, {"num_beams": 2}, {"use_cache": False}):
        options |= {"do_sample": False, "tokenizer": tiny_go.tokenizer(), "max_refinement_iterations": 1}
        together = model.generate_with_refinement(texts, **options)
        apart = [model.generate_with_refinement([text], **options) for text in texts]
        assert together.codes == [output.codes[0] for output in apart]
        assert [row[0].new_tokens for row in together.attempts] == [one.attempts[0][0].new_tokens for one in apart]


# Streaming


class Listener:
    def __init__(self):
        self.heard, self.ended = [], False

    def put(self, value):
        self.heard.append(value.flatten().tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "assisted"])
def test_a_streamer_gets_only_the_visible_prompt_and_the_code(options):
    model, batch, listener = tiny_go.writer(), encoded([PROMPTS[2]]), Listener()
    sequences = model.generate(**batch, **GREEDY, **options, streamer=listener)
    assert listener.heard[0] == batch["input_ids"][0].tolist() and listener.ended
    assert [token for part in listener.heard[1:] for token in part] == without_end(
        sequences[0, batch["input_ids"].shape[1] :]
    )


# Files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Save a model with unmodified logits and its tokenizer; return the folder."""
    folder = tmp_path_factory.mktemp("checkpoint") / "coder"
    tiny_go.model(awake=True, **tiny_go.SHORT).save_pretrained(folder)
    tiny_go.tokenizer().save_pretrained(folder)
    return folder


def test_the_pipeline_answers_prompts_batches_chats_and_the_guides_prompts(checkpoint):
    generate, tokenizer = pipeline("text-generation", model=str(checkpoint)), tiny_go.tokenizer()
    expected = [
        prompt + tokenizer.decode(new) for prompt, new in zip(PROMPTS, continuations(generate.model, encoded(PROMPTS)))
    ]
    assert [generate(prompt, **GREEDY)[0]["generated_text"] for prompt in PROMPTS] == expected
    assert [answers[0]["generated_text"] for answers in generate(PROMPTS, batch_size=3, **GREEDY)] == expected

    answer = generate([{"role": "user", "content": "return the sum"}], **GREEDY)[0]["generated_text"][-1]
    code = continuations(generate.model, {"input_ids": torch.tensor([tiny_go.task("return the sum")])})[0]
    assert answer == {"role": "assistant", "content": tokenizer.decode(code)}

    guide = [
        "func readFile(path string) error {",
        "// parseJSON parses a JSON string\nfunc parseJSON(data []byte)",
        "<PR_TITLE> Fix nil pointer dereference\n<PR_BODY>",
    ]
    for prompt in guide:
        options = {"num_return_sequences": 1, "temperature": 0.8, "top_p": 0.95, "do_sample": True}
        written = generate(prompt, max_length=200, **options)[0]["generated_text"]
        assert written.startswith(prompt) and len(written) > len(prompt)
        assert not any(tag in written[len(prompt) :] for tag in SPECIAL_TOKENS)


def test_text_streamer_prints_prompt_and_code(capsys):
    tokenizer, batch = tiny_go.tokenizer(), encoded([PROMPTS[2]])
    model = tiny_go.writer()
    model.generate(**batch, **GREEDY, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(continuations(model, batch)[0]).strip("\n")


SCRIPT = """
import sys
sys.modules["hrm_hf"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

folder, expected = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
for source in (folder, folder + "-again"):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    batch = tokenizer(expected["prompts"], padding=True, return_tensors="pt", return_token_type_ids=False)
    found = model.generate(**batch, do_sample=False, max_new_tokens=20)
    assert torch.equal(found, expected["sequences"])
    refined = model.generate_with_refinement(["return the sum"], tokenizer=tokenizer, do_sample=False)
    assert refined.codes == expected["codes"], refined.codes
    states = AutoModel.from_pretrained(source, trust_remote_code=True)(**batch).last_hidden_state
    torch.testing.assert_close(states, expected["states"])
    model.save_pretrained(folder + "-again")
print("loaded twice")
"""


@pytest.mark.slow  # tests/hub/test_hub_round_trip.py does this for every architecture
def test_a_process_without_the_package_generates_the_same(checkpoint, tmp_path):
    model = type(tiny_go.model()).from_pretrained(checkpoint)
    batch = encoded(PROMPTS)
    with torch.no_grad():
        expected = {
            "prompts": PROMPTS,
            "sequences": model.generate(**batch, **GREEDY),
            "codes": model.generate_with_refinement(
                ["return the sum"], tokenizer=tiny_go.tokenizer(), do_sample=False
            ).codes,
            "states": model.model(**batch).last_hidden_state,
        }
    torch.save(expected, tmp_path / "expected.pt")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint), str(tmp_path / "expected.pt")],
        cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.splitlines()[-1] == "loaded twice"


@pytest.mark.parametrize("cache", [True, False])
def test_plans_are_the_same_without_the_generator(cache):
    """The planner does not read the generator, so running it alone gives the same plans."""
    model = tiny_go.model(awake=True)
    batch = tiny_go.batch("<s> <PROBLEM> 9 </PROBLEM> <PLAN>", "<s> <PROBLEM> 3 </PROBLEM> <PLAN> 4 </PLAN> <CODE> 5 "
                          "</CODE> <VALIDATE> 2 </VALIDATE> <REFINE> <PLAN>", side="left")  # fmt: skip
    how = {"max_new_tokens": 12, "do_sample": False, "plan_first": False, "use_cache": cache, "eos_token_id": 299}
    whole = model.generate(**batch, **how, suppress_tokens=list(range(40)))
    alone = model.generate(**batch, **how, suppress_tokens=list(range(40)), planner_only=True)
    assert torch.equal(whole, alone)


def test_a_plan_does_not_run_the_generator(monkeypatch):
    model, calls = tiny_go.model(), []
    forward = type(model.model.generator).forward
    monkeypatch.setattr(type(model.model.generator), "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    ids = torch.tensor([tiny_go.stream("<s> <PROBLEM> 9 </PROBLEM> <PLAN>")])
    model.generate(ids, max_new_tokens=3, plan_first=False, planner_only=True)
    assert not calls
    model.generate(ids, max_new_tokens=3)
    assert calls
    with pytest.raises(ValueError, match="planner_only=True"):
        model(ids, labels=ids, planner_only=True)
