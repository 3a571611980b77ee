"""Records as token streams: contents of a row, labels, truncation and dropped records.

Referee: streams written out by hand, compared with what the tokenizer decodes.
"""

import gzip
import json
import random

import pytest
import tiny_go
import torch

from hrm_hf.golang.data.streams import IGNORED, GoCoderCollator, GoStreamBuilder, TooLongError, load_go_streams
from hrm_hf.io.files import BadLineError
from hrm_hf.models.processing_hrm_go_coder import CATEGORIES, TOKEN_IDS
from hrm_hf.text.byte_tokenizer import byte_tokenizer


FRONT = "<s><PROBLEM>Add1 returns the sum</PROBLEM><CONTEXT><FILE>sum.go</FILE>package sum\n</CONTEXT>"
PLAN = "<INTENT:ADD><TARGET:func>Add1<STEP>return the sum</PLAN>"
PREFIX = "func Add1(a, b int) int {"
BODY = "\n\treturn a + b + 1\n}\n"


@pytest.fixture(scope="module")
def builder():
    return tiny_go.builder()


def text(ids) -> str:
    return tiny_go.tokenizer().decode(ids)


def spans(row) -> list[str]:
    """Return the labeled spans of a row as text."""
    found, last = [], None
    for index, (token, label) in enumerate(zip(row["input_ids"], row["labels"])):
        if label == IGNORED:
            continue
        assert label == token  # labels are not shifted
        if last is not None and last == index - 1:
            found[-1].append(label)
        else:
            found.append([label])
        last = index
    return [text(part) for part in found]


# ---- a row ----


def test_a_record_without_attempts_contains_problem_context_plan_and_code(builder):
    row = builder.build(tiny_go.record(1))
    assert text(row["input_ids"]) == f"{FRONT}<PLAN>{PLAN}<CODE>{PREFIX}{BODY}</CODE></s>"
    assert spans(row) == [f"{PLAN}<CODE>", f"{BODY}</CODE></s>"]
    assert row["decision_positions"] == row["decision_labels"] == row["feedback_ids"] == []
    assert row["length"] == len(row["input_ids"]) == len(row["labels"])
    assert row == builder.build(tiny_go.record(1, "rcd"), refinement=False)


def test_a_repair_contains_all_attempts_and_labels_decisions_and_last_code(builder):
    row = builder.build(tiny_go.record(1, "rcd"))
    assert text(row["input_ids"]) == (
        f"{FRONT}<PLAN>{PLAN}<CODE>{PREFIX}\n\treturn a - b\n}}\n</CODE><VALIDATE><SYNTAX_OK></VALIDATE><REFINE>"
        f"<PLAN>{PLAN}<CODE>{PREFIX}\n\treturn a + \n}}\n</CODE>"
        "<VALIDATE><SYNTAX_ERR>unexpected token, line 3: expected operand</VALIDATE><RETRY>"
        f"<CODE>{PREFIX}{BODY}</CODE><VALIDATE><SYNTAX_OK></VALIDATE><DONE></s>"
    )
    assert spans(row) == [
        f"{PLAN}<CODE>", f"<REFINE><PLAN>{PLAN}<CODE>", "<RETRY><CODE>", f"{BODY}</CODE>", "<DONE></s>"
    ]  # fmt: skip


def test_a_decision_follows_its_attempt_and_the_validator_feedback(builder):
    row = builder.build(tiny_go.record(1, "rcd"))
    assert [row["input_ids"][position] for position in row["decision_positions"]] == [TOKEN_IDS["</CODE>"]] * 3
    assert row["decision_labels"] == [1, 0, 2]
    third_of_four_lines = 2 * 32 // 4
    assert row["feedback_ids"] == [
        [1, 0, 0, 0], [2, 0, CATEGORIES.index("unexpected token"), third_of_four_lines], [1, 0, 0, 0]
    ]  # fmt: skip


def test_an_attempt_without_feedback_has_an_empty_validation(builder):
    record = tiny_go.record(1, "d")
    record["attempts"][0]["feedback"] = None
    row = builder.build(record)
    assert text(row["input_ids"]).endswith("</CODE><VALIDATE></VALIDATE><DONE></s>")
    assert row["feedback_ids"] == [[0, 0, 0, 0]]


def test_the_scored_code_is_the_labeled_body_with_closing_tag_and_byte_count(builder):
    record = tiny_go.record(1, "cd")
    record["solution"]["code"] = record["attempts"][1]["code"] = PREFIX + "\n\treturn 'é'\n}\n"
    row = builder.build(record)
    assert text(row["input_ids"][row["code_start"] : row["code_end"]]) == "\n\treturn 'é'\n}\n</CODE>"
    assert row["code_bytes"] == len("\n\treturn 'é'\n}\n".encode())


def test_user_text_never_becomes_a_tag(builder):
    record = tiny_go.record(1)
    record["problem"]["title"] = "</PROBLEM><PLAN><DONE>"
    record["context"]["before"] = "</s><CODE>"
    ids = builder.build(record)["input_ids"]
    assert "</PROBLEM><PLAN><DONE></PROBLEM>" in text(ids)
    for token in ("<PLAN>", "</PROBLEM>", "<CODE>", "</s>"):
        assert ids.count(TOKEN_IDS[token]) == 1
    assert TOKEN_IDS["<DONE>"] not in ids


def test_prompts_end_where_plan_and_code_begin(builder):
    record = tiny_go.record(1, "cd")
    assert text(builder.prompt_ids(record)) == f"{FRONT}<PLAN>"
    assert text(builder.code_prompt_ids(record)) == f"<CODE>{PREFIX}"
    row = builder.build(record)["input_ids"]
    assert row[: len(builder.prompt_ids(record))] == builder.prompt_ids(record)


def test_code_that_does_not_begin_with_its_prefix_is_rejected(builder):
    record = tiny_go.record(1) | {"code_prefix": "func Other("}
    with pytest.raises(ValueError, match=r"'sum.go:1': code_prefix='func Other\('"):
        builder.build(record)


def test_a_tokenizer_without_the_tags_is_rejected():
    with pytest.raises(ValueError, match="tokenizer="):
        GoStreamBuilder(byte_tokenizer())


# ---- budgets ----


def test_the_context_is_truncated_from_the_middle_and_then_removed(builder):
    record = tiny_go.record(1)
    words = [f"w{number}" for number in range(300)]
    record["context"]["before"] = " ".join(words)
    plain = len(builder.build(tiny_go.record(1))["input_ids"])
    cut = text(tiny_go.builder(max_length=plain + 60).build(record)["input_ids"])
    inner = cut[cut.index("</FILE>") + 7 : cut.index("</CONTEXT>")]
    assert inner.startswith("w0 w1") and inner.endswith("w298 w299") and "w150" not in inner
    assert f"<PROBLEM>Add1 returns the sum</PROBLEM><CONTEXT><FILE>sum.go</FILE>{inner}</CONTEXT><PLAN>" in cut
    none = text(tiny_go.builder(max_length=plain - 1).build(record)["input_ids"])
    assert "<CONTEXT>" not in none and "Add1 returns the sum</PROBLEM><PLAN>" in none
    assert "w150" in text(tiny_go.builder(max_length=10**4, context_budget=10**4).build(record)["input_ids"])


def test_the_end_of_the_problem_is_truncated_after_the_context(builder):
    record = tiny_go.record(1)
    record["problem"]["body"] = "word " * 200
    row = tiny_go.builder(max_length=160).build(record)
    assert len(row["input_ids"]) == 160
    assert text(row["input_ids"]).startswith("<s><PROBLEM>Add1 returns the sum\n\nword word")
    assert text(row["input_ids"]).endswith(f"</PROBLEM><PLAN>{PLAN}<CODE>{PREFIX}{BODY}</CODE></s>")
    within = tiny_go.builder(problem_budget=40).build(record)["input_ids"]
    assert within.index(TOKEN_IDS["</PROBLEM>"]) == 40


@pytest.mark.parametrize(
    ("budgets", "attempts", "reason"),
    [({"plan_budget": 5}, "", "plan"), ({"code_budget": 20}, "", "code"), ({"max_length": 40}, "cccd", "stream")],
)
def test_records_over_budget_are_rejected_with_the_reason(budgets, attempts, reason):
    record = tiny_go.record(1, attempts)
    with pytest.raises(TooLongError, match=r"record 'sum\.go:1'") as error:
        tiny_go.builder(**budgets).build(record)
    assert error.value.reason == reason


def test_failed_attempts_over_budget_are_dropped_oldest_first(tmp_path, builder):
    record = tiny_go.record(1, "ccd")
    record["attempts"][0]["code"] = PREFIX + " x" * 50
    shorter = {**record, "attempts": record["attempts"][1:]}
    within = tiny_go.builder(code_budget=40)
    assert within.build(record) == within.build(shorter)
    length = len(builder.build(shorter)["input_ids"])
    assert tiny_go.builder(max_length=length).build(record) == builder.build(shorter)
    streams = load(within, tiny_go.write(tmp_path / "a.jsonl", [record]))
    assert streams.counts["left_out"] == 1 and "without 1 that do not fit" in streams.describe()


def test_no_row_exceeds_its_budgets():
    draw = random.Random(0)
    kept = 0
    for number in range(150):
        record = tiny_go.record(number, draw.choice(["", "d", "cd", "rcd"]))
        record["problem"]["body"] = "é word\n" * draw.randrange(200)
        record["context"]["before"] = "x := <DONE> 1\n" * draw.randrange(200)
        builder = tiny_go.builder(
            max_length=draw.randrange(60, 600), problem_budget=draw.randrange(20, 300),
            context_budget=draw.randrange(0, 300),
        )  # fmt: skip
        try:
            row = builder.build(record)
        except TooLongError:
            continue
        kept += 1
        assert len(row["input_ids"]) <= builder.max_length
        assert len(builder.prompt_ids(record)) <= min(
            builder.max_length + 1, 2 + builder.problem_budget + builder.context_budget
        )
    assert kept > 50


# ---- batches ----


def test_a_batch_is_padded_on_the_right_to_a_multiple_of_eight(builder):
    rows = [builder.build(tiny_go.record(1)), builder.build(tiny_go.record(2, "rcd"))]
    batch = GoCoderCollator(3)(rows)
    assert batch["input_ids"].shape[1] % 8 == 0 and batch["input_ids"].shape[1] - rows[1]["length"] < 8
    for index, row in enumerate(rows):
        size = row["length"]
        assert batch["input_ids"][index, :size].tolist() == row["input_ids"]
        assert batch["labels"][index, :size].tolist() == row["labels"]
        assert (batch["input_ids"][index, size:] == 3).all() and (batch["labels"][index, size:] == IGNORED).all()
        assert batch["attention_mask"][index].sum() == size and batch["attention_mask"][index, :size].all()
    assert batch["decision_labels"].tolist() == [[IGNORED] * 3, [1, 0, 2]]
    assert batch["decision_positions"][0].tolist() == [0, 0, 0]
    assert batch["feedback_ids"].shape == (2, 3, 4)


def test_other_models_get_only_ids_mask_and_labels(builder):
    row = builder.build(tiny_go.record(1, "cd"))
    row = {name: value for name, value in row.items() if not name.startswith("code_")}
    assert GoCoderCollator(3, decisions=False)([row]).keys() == {"input_ids", "attention_mask", "labels"}


def test_scored_labels_cover_only_the_code(builder):
    rows = [builder.build(tiny_go.record(number, "cd")) for number in (1, 22)]
    batch = GoCoderCollator(3)(rows)
    for index, number in enumerate((1, 22)):
        scored = batch["scored_labels"][index]
        assert text(scored[scored != IGNORED].tolist()) == f"\n\treturn a + b + {number}\n}}\n</CODE>"
    assert batch["scored_bytes"].tolist() == [len(BODY), len(BODY) + 1]


def test_batches_contain_no_attempts_until_the_warmup_ends(tmp_path, builder):
    path = tiny_go.write(tmp_path / "train.jsonl", tiny_go.records(4))
    options = {"training": True, "cache_dir": str(tmp_path / "cache")}
    rows = load_go_streams([path], builder, plain=True, **options).rows
    collator = GoCoderCollator(3, plain_steps=5)
    whole = collator.at_step(collator(list(rows)), 5)
    plain = collator.at_step(collator(list(rows)), 4)
    assert "plain" not in whole and (whole["decision_labels"] >= 0).sum() == 0 + 1 + 2 + 3
    assert (plain["decision_labels"] == IGNORED).all()
    expected = GoCoderCollator(3)([builder.build(one, refinement=False) for one in tiny_go.records(4)])
    assert all(torch.equal(plain[name], expected[name]) for name in plain)


# ---- files ----


def load(builder, *paths, **options):
    folder = paths[0].parent
    return load_go_streams(list(paths), builder, training=True, cache_dir=str(folder / "cache"), **options)


def test_files_become_rows_in_their_order_with_counts(tmp_path, builder):
    first = tiny_go.write(tmp_path / "a.jsonl", tiny_go.records(5))
    second = tmp_path / "b.jsonl.gz"
    with gzip.open(second, "wt") as file:
        file.write(json.dumps(tiny_go.record(7, "cd")) + "\n")
    streams = load(builder, first, second)
    rows = [builder.build(record) for record in [*tiny_go.records(5), tiny_go.record(7, "cd")]]
    assert streams.rows["input_ids"][:] == [row["input_ids"] for row in rows]
    assert streams.rows["labels"][:] == [row["labels"] for row in rows]
    assert "code_start" not in streams.rows.column_names
    assert streams.counts == {
        "records": 6, "bad": 0, "kept": 6, "tokens": sum(row["length"] for row in rows),
        "targets": sum(label != IGNORED for row in rows for label in row["labels"]), "attempts": 8, "left_out": 0,
    }  # fmt: skip


def test_several_processes_write_the_same_rows(tmp_path, builder):
    path = tiny_go.write(tmp_path / "a.jsonl", tiny_go.records(9))
    assert load(builder, path).rows[:] == load(tiny_go.builder(), path, num_workers=2).rows[:]


def test_records_that_do_not_fit_are_dropped_and_counted(tmp_path):
    rows = tiny_go.records(4)
    rows[1]["solution"]["code"] += "x" * 500
    rows[1]["attempts"] = []
    streams = load(tiny_go.builder(code_budget=100), tiny_go.write(tmp_path / "a.jsonl", rows))
    assert streams.counts["code"] == 1 and streams.counts["kept"] == len(streams.rows) == 3
    assert [record["id"] for record in streams.records] == ["sum.go:0", "sum.go:2", "sum.go:3"]
    assert "3 of 4 records" in streams.describe() and "dropped 1 with code that is too long" in streams.describe()


def test_a_broken_line_stops_with_file_and_line_or_is_counted(tmp_path, builder):
    path = tiny_go.write(tmp_path / "a.jsonl", tiny_go.records(3))
    with path.open("a") as file:
        file.write('{"id": \n' + json.dumps({"id": "x"}) + "\n")
    with pytest.raises(BadLineError, match=r"a\.jsonl, line 4"):
        load(builder, path)
    streams = load(builder, path, on_bad_line="skip")
    assert streams.counts["bad"] == 2 and streams.counts["kept"] == 3 and "2 unreadable lines" in streams.describe()


def test_an_empty_training_set_is_an_error_with_the_reason(tmp_path):
    path = tiny_go.write(tmp_path / "a.jsonl", tiny_go.records(3))
    with pytest.raises(ValueError, match="'plan': 3"):
        load(tiny_go.builder(plan_budget=2), path)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        load(tiny_go.builder(), tmp_path / "none.jsonl")
