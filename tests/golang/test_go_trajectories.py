"""Mutations of Go code, and trajectories built from a validator's verdicts."""

import random
from dataclasses import asdict

import pytest

from hrm_hf.golang.data import trajectories as module
from hrm_hf.golang.data.records import new_record, validate_record
from hrm_hf.golang.data.trajectories import (
    OPERATORS,
    TrajectoryCounts,
    body_of,
    build_trajectories,
    go_tokens,
    mutants,
)
from hrm_hf.golang.validators.go_validators import GoParserValidator, TreeSitterValidator
from hrm_hf.golang.validators.syntax import syntax_shape
from hrm_hf.golang.validators.toolchain import GoNotFoundError, find_go
from hrm_hf.models.processing_hrm_go_coder import Feedback


PREFIX = "func clamp(value, low, high int) int {"
CODE = """func clamp(value, low, high int) int {
	// nothing below low
	if value < low {
		return low
	}
	limit := high + 0
	again := limit
	if value > limit && again == limit {
		return high
	}
	return value
}"""
PLAN = {
    "intent": "ADD",
    "targets": ["func:clamp"],
    "steps": [{"intent": "ADD", "target": "func:clamp", "text": "check"}],
}


def record(number: int = 0, code: str = CODE, prefix: str = PREFIX) -> dict:
    """Return a plain record of a valid function."""
    return new_record(f"r{number}", source="test", group="g", code=code, code_prefix=prefix, title="clamp", plan=PLAN)


def many(count: int) -> list[dict]:
    """Return records that differ in the name of a variable."""
    return [record(number, CODE.replace("limit", f"limit{number}")) for number in range(count)]


def same_code(first: str, second: str) -> bool:
    return syntax_shape(first) == syntax_shape(second)


def trajectories(records, validator=None, **options) -> tuple[list[dict], TrajectoryCounts]:
    counts = TrajectoryCounts()
    validator = validator or TreeSitterValidator()
    return list(build_trajectories(records, validator, counts=counts, **options)), counts


# ---- operators ----


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_changes_the_body_and_never_the_prefix(name):
    for seed in range(20):
        damaged = OPERATORS[name](body_of(CODE, PREFIX), random.Random(seed))
        assert damaged.startswith(PREFIX)
        assert damaged != CODE


def test_each_operator_makes_its_named_change():
    body = body_of("func f() {\n\ta := b\n\tc := d\n}", "func f() {")
    seen = {name: {operator(body, random.Random(seed)) for seed in range(200)} for name, operator in OPERATORS.items()}
    whole = "func f() {\n\ta := b\n\tc := d\n"
    assert seen["delete brace"] == {whole}
    assert seen["delete line"] == {"func f() {\n\tc := d\n}", "func f() {\n\ta := b\n}", whole}
    assert seen["swap lines"] == {"func f() {\n\tc := d\n\ta := b\n}"}
    assert seen["flip operator"] == {None}
    # each of six names and signs, and the brace
    assert [len(seen[name]) for name in ("duplicate token", "delete token", "truncate")] == [7, 7, 7]
    assert "func f() {\n\ta := b b\n\tc := d\n}" in seen["duplicate token"]
    assert "func f() {\n\ta  b\n\tc := d\n}" in seen["delete token"]
    assert "func f() {\n\ta := b\n\tc := " in seen["truncate"]
    # four names have six pairs
    assert len(seen["swap identifiers"]) == 6
    assert "func f() {\n\td := b\n\tc := a\n}" in seen["swap identifiers"]


def test_operators_are_flipped_and_pointers_are_not():
    code = "func f(p *int) bool {\n\treturn *p == 1\n}"
    body = body_of(code, "func f(p *int) bool {")
    flipped = {OPERATORS["flip operator"](body, random.Random(seed)) for seed in range(9)}
    assert flipped == {code.replace("==", "!=")}


def test_a_string_is_one_token_and_a_comment_is_skipped():
    tokens = [token.text for token in go_tokens("func f() { // note\n\tg(\"a\\n\", `raw // x`, 'c')\n}")]
    assert tokens == ["func", "f", "(", ")", "{", "g", "(", '"a\\n"', ",", "`raw // x`", ",", "'c'", ")", "}"]


def test_token_offsets_are_correct_after_multibyte_characters():
    code = 'func f() string {\n\treturn "zażółć" + "ω"\n}'
    for seed in range(20):
        for damaged in mutants(code, "func f() string {", random.Random(seed)):
            assert "�" not in damaged


def test_the_same_seed_gives_the_same_mutants():
    first, second = (mutants(CODE, PREFIX, random.Random(3)) for _ in range(2))
    assert first == second


def test_code_that_does_not_begin_with_the_prefix_is_rejected():
    with pytest.raises(ValueError, match="prefix='func other"):
        mutants(CODE, "func other() {", random.Random(0))


def test_comparison_ignores_layout_and_comments_but_not_tokens():
    assert same_code(CODE, CODE.replace("\t// nothing below low\n", "").replace("\t", "    "))
    assert not same_code(CODE, CODE.replace("limit && again", "limit || again"))
    assert not same_code('func f() { g("a b") }', 'func f() { g("a  b") }')


# ---- trajectories ----


def test_every_trajectory_is_a_valid_record_that_ends_in_its_solution():
    made, counts = trajectories(many(30))
    assert len(made) > 30 and counts.shares().keys() == {"CONTINUE", "DONE"}
    for trajectory in made:
        validate_record(trajectory)
        codes = [attempt["code"] for attempt in trajectory["attempts"]]
        assert len(set(codes)) == len(codes), "an attempt is repeated"


def test_labels_follow_the_validator_instead_of_the_operator(monkeypatch):
    monkeypatch.setattr(module, "NO_FEEDBACK_SHARE", 0)
    made, counts = trajectories(many(40))
    validator = TreeSitterValidator()
    for trajectory in made:
        for attempt in trajectory["attempts"]:
            parses = validator([attempt["code"]])[0].syntax_ok
            assert attempt["decision"] == ("DONE" if parses else "CONTINUE")
            assert attempt["feedback"]["syntax_ok"] is parses
            assert parses is (attempt["code"] == trajectory["solution"]["code"])
    assert counts.dropped["candidate passes"] > 100  # different code that parses: the validator accepts it


def types_by_name(codes):
    """Stand-in type checker: valid code type-checks if it contains "again" at least twice."""
    verdicts = TreeSitterValidator()(codes)
    wrong = Feedback(syntax_ok=True, types_ok=False, category="undefined name", line=2, message="undefined: again")
    right = Feedback(syntax_ok=True, types_ok=True)
    return [(right if c.count("again") > 1 else wrong) if v.syntax_ok else v for c, v in zip(codes, verdicts)]


def test_the_type_oracle_refines_code_that_passed_only_the_syntax_check(monkeypatch):
    monkeypatch.setattr(module, "NO_FEEDBACK_SHARE", 0)
    made, counts = trajectories(many(200), types_by_name, oracle="types")
    attempts = [attempt for trajectory in made for attempt in trajectory["attempts"]]
    refined = [a for a in attempts if a["decision"] == "REFINE"]
    assert len(refined) > 5 and counts.kinds["syntax"] > 20 and counts.kinds["types"] > 10
    for attempt in refined:
        assert attempt["feedback"] == asdict(Feedback(syntax_ok=True)) and attempt["code"].count("again") < 2
    for trajectory in made:
        assert trajectory["attempts"][-1]["decision"] == "DONE"
        seen = {attempt["feedback"]["types_ok"] for attempt in trajectory["attempts"]}
        assert seen <= {None} or "REFINE" not in {a["decision"] for a in trajectory["attempts"]}
    hidden = [t["attempts"][-1]["feedback"]["types_ok"] is None for t in made]
    assert sum(hidden) / len(hidden) == pytest.approx(0.5, abs=0.1)


def test_the_attempt_index_does_not_predict_the_solution():
    made, counts = trajectories(many(300), per_record=1)
    assert counts.shares()["DONE"] == pytest.approx(1 / 3, abs=0.03), counts.shares()
    done = [[len(t["attempts"]) == n for t in made if len(t["attempts"]) >= n] for n in (1, 2, 3)]
    # 300 draws of 0.19 have a standard deviation of 0.023; of the 200 that go on, 0.028
    assert [sum(flags) / len(flags) for flags in done] == pytest.approx([0.19] * 3, abs=0.09)


def test_mutants_equal_to_the_original_are_skipped():
    # Swapping equal lines, or deleting one of two semicolons, changes no tree.
    code = "func f() {\n\tg();\n\tg();\n}"
    records = [record(number, code=code, prefix="func f() {") for number in range(20)]
    made, counts = trajectories(records, per_record=4)
    assert counts.dropped["candidate is the same code"] > 0
    assert all(not same_code(a["code"], code) for t in made for a in t["attempts"][:-1])


def test_a_type_error_is_retried_with_the_same_plan(monkeypatch):
    monkeypatch.setattr(module, "NO_FEEDBACK_SHARE", 0)
    sound = {plain["solution"]["code"] for plain in many(20)}
    wrong = Feedback(syntax_ok=True, types_ok=False, category="mismatched types", line=1, message="m")

    def validator(codes):
        return [Feedback(syntax_ok=True, types_ok=True) if code in sound else wrong for code in codes]

    made, counts = trajectories(many(20), validator)
    attempts = [attempt for trajectory in made for attempt in trajectory["attempts"]]
    assert counts.decisions["REFINE"] == 0
    assert {a["feedback"]["types_ok"] for a in attempts if a["decision"] == "DONE"} == {True}
    assert {a["feedback"]["category"] for a in attempts if a["decision"] == "CONTINUE"} == {"mismatched types"}


def test_type_errors_are_ignored_if_the_solution_has_undefined_names(monkeypatch):
    monkeypatch.setattr(module, "NO_FEEDBACK_SHARE", 0)

    def validator(codes):
        wrong = Feedback(syntax_ok=True, types_ok=False, category="undefined name", line=1, message="x")
        return [wrong if parsed.syntax_ok else parsed for parsed in TreeSitterValidator()(codes)]

    for oracle in ("none", "types"):
        made, counts = trajectories(many(20), validator, oracle=oracle)
        attempts = [attempt for trajectory in made for attempt in trajectory["attempts"]]
        assert {a["feedback"]["types_ok"] for a in attempts} == {None} and counts.kinds["types"] == 0
        assert {a["decision"] for a in attempts} == {"CONTINUE", "DONE"}


def test_feedback_is_dropped_from_all_attempts_of_a_tenth_of_trajectories():
    made, _ = trajectories(many(300), per_record=1)
    silent = [t for t in made if all(attempt["feedback"] is None for attempt in t["attempts"])]
    partly = [t for t in made if any(attempt["feedback"] is None for attempt in t["attempts"])]
    assert len(silent) == len(partly)
    assert len(silent) / len(made) == pytest.approx(0.1, abs=0.06)


def test_solutions_that_do_not_parse_or_lack_a_body_are_counted_and_skipped():
    broken = record(1, f"{PREFIX}\n\tif {{\n}}")
    empty = record(2, PREFIX)
    made, counts = trajectories([broken, empty], lambda codes: [Feedback(syntax_ok=c == PREFIX) for c in codes])
    assert made == []
    assert counts.dropped == {"solution does not parse": 1, "solution is its prefix alone": 1}


def test_a_trajectory_stays_below_the_character_limit(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARACTERS", 3 * len(CODE) + 60)
    made, counts = trajectories(many(30))
    assert max(sum(len(a["code"]) for a in t["attempts"]) for t in made) <= 3 * len(CODE) + 60
    assert counts.dropped["failed attempt: trajectory too long"] > 0


def test_the_same_seed_gives_the_same_trajectories_and_another_seed_others():
    first, second, other = (trajectories(many(70), seed=seed)[0] for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_trajectories_of_a_record_have_distinct_failed_attempts_and_ids(monkeypatch):
    monkeypatch.setattr(module, "FAILED_ATTEMPTS", (0, 1))
    made, _ = trajectories(many(1), per_record=3)
    assert [t["id"] for t in made] == ["r0#1", "r0#2", "r0#3"]
    assert len({t["attempts"][0]["code"] for t in made}) == 3


@pytest.mark.external
def test_the_go_parser_agrees_that_refined_attempts_parse_and_retried_ones_do_not():
    try:
        find_go()
    except GoNotFoundError as error:
        pytest.skip(str(error))
    made, _ = trajectories(many(20))
    with GoParserValidator() as gofmt:
        for trajectory in made:
            decisions = [attempt["decision"] for attempt in trajectory["attempts"]]
            verdicts = gofmt([attempt["code"] for attempt in trajectory["attempts"]])
            assert [verdict.syntax_ok for verdict in verdicts] == [decision != "CONTINUE" for decision in decisions]
