"""The reasoning suite: questions, their answers, rows and data sets.

Referees: every answer is computed again from the words of the row, by plain Python that knows nothing of numpy: an
automaton cell by cell, a dict of arrows, lists of items, int addition, a stack of brackets, a search through the maze.
"""

import hashlib
import itertools
from collections import deque

import numpy as np
import pytest

from hrm_hf.io.usage import UsageError
from hrm_hf.text.options import BuildReasoning
from hrm_hf.text.reasoning.build import build_reasoning, draw_rows, load_reasoning_info, readable
from hrm_hf.text.reasoning.tasks import ID, NO_LABEL, TASKS, WORDS, reasoning_tokenizer


ANSWERS = [(name, answers) for name, task in TASKS.items() for answers in task.answer_kinds]


def questions(name: str, answers: str, difficulty: int, count: int = 40, **options):
    """Yield the words and the answers, as (position, word, steps), of each question."""
    task = TASKS[name](answers=answers, **options)
    drawn = task.draw(difficulty, count, np.random.default_rng(difficulty))
    assert drawn.words.shape == drawn.answers.shape == drawn.steps.shape and len(drawn.words) == count
    for words, answered, steps in zip(drawn.words.tolist(), drawn.answers.tolist(), drawn.steps.tolist()):
        assert [step > 0 for step in steps] == [answer != NO_LABEL for answer in answered]
        asked = [(at, WORDS[answer], steps[at]) for at, answer in enumerate(answered) if answer != NO_LABEL]
        yield [WORDS[word] for word in words], asked


@pytest.mark.parametrize("answers", ["all", "last"])
@pytest.mark.parametrize("difficulty", [1, 5])
def test_automaton_answers_follow_rule_110(answers, difficulty):
    new_cell = dict(zip(itertools.product("10", repeat=3), "01101110"))  # Wolfram's table of rule 110
    for words, asked in questions("automaton", answers, difficulty, size=7):
        cells = [word for word in words if word in "01"]
        rows = []
        for _ in range(difficulty):
            cells = [new_cell[cells[i - 1], cells[i], cells[(i + 1) % 7]] for i in range(7)]
            rows.append(cells)
        wanted = rows if answers == "all" else rows[-1:]
        assert [word for _, word, _ in asked] == [cell for row in wanted for cell in row]
        assert words.count("_") == 7 * len(wanted)
        assert words.count("|") == (0 if answers == "all" else difficulty)
        assert {steps for _, _, steps in asked} == set(range(1, difficulty + 1) if answers == "all" else [difficulty])


@pytest.mark.parametrize("answers", ["all", "last"])
@pytest.mark.parametrize("difficulty", [1, 4])
def test_pointers_answer_the_node_after_each_hop(answers, difficulty):
    for words, asked in questions("pointers", answers, difficulty, size=6):
        arrows = dict(word.split(">") for word in words if ">" in word)
        assert sorted(arrows) == sorted(arrows.values()) == [str(node) for node in range(6)]
        node, hops, found = None, 0, {}
        for place, word in enumerate(words[6:], start=6):
            node, hops = (word.removeprefix("from"), 1) if word.startswith("from") else (node, hops + 1)
            node = arrows[node]
            found[place] = (f"at{node}", hops)
        assert {place: (word, steps) for place, word, steps in asked} == {
            place: answer for place, answer in found.items() if answers == "all" or answer[1] == difficulty
        }
        assert sum(word.startswith("from") for word in words) == 6
        ring = ["0"]
        while (node := arrows[ring[-1]]) != "0":
            ring.append(node)
        assert len(ring) == 6  # a single ring, so fewer hops never return


@pytest.mark.parametrize("answers", ["all", "last"])
@pytest.mark.parametrize("difficulty", [1, 6])
def test_permutations_answer_the_arrangement_after_each_generator(answers, difficulty):
    for words, asked in questions("permutations", answers, difficulty):
        items, given = words[:5], iter(word for word in words if word == "turn" or word.startswith("x"))
        wanted = []
        for step, name in enumerate(given, start=1):
            if name == "turn":
                items = [items[-1], *items[:-1]]
            else:
                place = int(name[1:])
                items[place], items[place + 1] = items[place + 1], items[place]
            wanted += [(item, step) for item in items] if answers == "all" or step == difficulty else []
        assert [(word, steps) for _, word, steps in asked] == wanted
        assert all(words[place] == "_" for place, _, _ in asked)


def test_permutation_generators_generate_s5():
    table = [tuple(row) for row in TASKS["permutations"]().generators().tolist()]
    reached, new = set(), {tuple(range(5))}
    while new:
        reached |= new
        new = {tuple(one[place] for place in generator) for one in new for generator in table} - reached
    assert len(reached) == 120


@pytest.mark.parametrize("answers", ["all", "last"])
@pytest.mark.parametrize("difficulty", [1, 7])
def test_addition_answers_the_last_digits_of_the_sum(answers, difficulty):
    for words, asked in questions("addition", answers, difficulty, size=4):
        groups = " ".join(words).split("+")[1:]
        numbers = [int("".join(reversed([word for word in group.split() if word != "_"]))) for group in groups]
        sums = list(itertools.accumulate(numbers))
        wanted = [(digit, step) for step, total in enumerate(sums, start=1) for digit in f"{total:04d}"[:-5:-1]]
        wanted = wanted if answers == "all" else [one for one in wanted if one[1] == difficulty]
        assert [(word, steps) for _, word, steps in asked] == wanted
        assert len(numbers) == difficulty


@pytest.mark.parametrize("answers", ["all", "last"])
@pytest.mark.parametrize("difficulty", [1, 4])
def test_brackets_answer_the_next_bracket_to_close(answers, difficulty):
    for words, asked in questions("brackets", answers, difficulty):
        closed_by, stack, wanted, depths = {"(": ")", "[": "]", "{": "}"}, [], [], []
        for place, word in enumerate(words):
            if word in closed_by:
                stack.append(closed_by[word])
            else:
                assert word == stack.pop()
            depths.append(len(stack))
            wanted.append((place, stack[-1] if stack else ".", max(1, len(stack))))
        assert max(depths) == difficulty
        assert asked == (wanted if answers == "all" else wanted[-1:])


@pytest.mark.parametrize("difficulty", [1, 6])
def test_mazes_mark_the_cells_on_the_shortest_paths(difficulty):
    side = 5
    for words, asked in questions("maze", "last", difficulty, size=side):
        board = words[: side * side]
        from_start, to_goal = (search(board, side, board.index(mark)) for mark in "SG")
        assert from_start[board.index("G")] == difficulty
        far = side * side
        on_the_way = [from_start.get(cell, far) + to_goal.get(cell, far) == difficulty for cell in range(side * side)]
        assert [word for _, word, _ in asked] == ["o" if cell else "." for cell in on_the_way]


def search(board: list[str], side: int, start: int) -> dict[int, int]:
    """Return the steps from the start to every reachable cell."""
    found, waiting = {start: 0}, deque([start])
    while waiting:
        cell = waiting.popleft()
        row, column = divmod(cell, side)
        for near in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if 0 <= near[0] < side and 0 <= near[1] < side:
                place = near[0] * side + near[1]
                if board[place] != "#" and place not in found:
                    found[place] = found[cell] + 1
                    waiting.append(place)
    return found


@pytest.mark.parametrize(("name", "answers"), ANSWERS)
def test_labels_are_shifted_one_place_after_their_word(name, answers):
    task = TASKS[name](answers=answers)
    difficulties = np.array([3, 1, 3, 2])
    rows = draw_rows(task, difficulties, np.random.default_rng(5))
    rng = np.random.default_rng(5)
    drawn = {one: task.draw(one, int((difficulties == one).sum()), rng) for one in (1, 2, 3)}
    taken = dict.fromkeys(drawn, 0)
    for row, one in enumerate(difficulties.tolist()):
        question, length = drawn[one], drawn[one].words.shape[1]
        place, taken[one] = taken[one], taken[one] + 1
        assert rows["input_ids"][row, 0] == ID["<|startoftext|>"]
        assert rows["input_ids"][row, 1 : length + 1].tolist() == question.words[place].tolist()
        assert rows["input_ids"][row, length + 1] == ID["<|endoftext|>"]
        assert set(rows["input_ids"][row, length + 2 :].tolist()) <= {ID["<|pad|>"]}
        assert rows["labels"][row, 2 : length + 2].tolist() == question.answers[place].tolist()
        assert set(rows["labels"][row, :2].tolist()) | set(rows["labels"][row, length + 2 :].tolist()) == {NO_LABEL}
    assert rows["difficulty"].tolist() == difficulties.tolist()


# SHA-256 of 300 rows of each task; numpy 2.0.2 and 2.4.6 on x86-64 give the same.
GOLDEN = {
    "automaton all": "03f80e3731393a9d",
    "automaton last": "35f42779cbbf41dc",
    "pointers all": "e4b62650a4f24e28",
    "pointers last": "a7fc7fa10bededc7",
    "permutations all": "c0515e05c0e27340",
    "permutations last": "2188c9c7679183bb",
    "addition all": "a5e4de8472d793d6",
    "addition last": "7f2815a3ef54f879",
    "brackets all": "7f8459b3ab2a8795",
    "brackets last": "f82dbeb84bde62de",
    "maze last": "47b16a93f08a8b66",
}


@pytest.mark.parametrize(("name", "answers"), ANSWERS)
def test_rows_of_a_seed_are_bit_identical_everywhere(name, answers):
    task = TASKS[name](answers=answers)
    rows = draw_rows(task, np.arange(300) % task.trained[1] + 1, np.random.default_rng(17))
    content = b"".join(rows[column].astype("<i4").tobytes() for column in sorted(rows))
    assert hashlib.sha256(content).hexdigest()[:16] == GOLDEN[f"{name} {answers}"]


def test_tokenizer_covers_all_words_and_round_trips(tmp_path):
    from transformers import AutoTokenizer

    reasoning_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(WORDS) == len(set(WORDS))
    rows = draw_rows(TASKS["pointers"](), np.array([2]), np.random.default_rng(0))
    words = [WORDS[word] for word in rows["input_ids"][0, 1:-1]]
    assert tokenizer(" ".join(words))["input_ids"] == rows["input_ids"][0, 1:-1].tolist()
    assert tokenizer.decode(rows["input_ids"][0], skip_special_tokens=True) == " ".join(words)
    assert tokenizer.convert_ids_to_tokens([tokenizer.pad_token_id, tokenizer.eos_token_id]) == [
        "<|pad|>", "<|endoftext|>"
    ]  # fmt: skip
    shown = readable(rows)[0].split()
    assert [word.partition("=")[0] for word in shown] == words
    assert sum("=" in word for word in shown) == (rows["labels"] != NO_LABEL).sum()


def test_datasets_reads_a_folder_and_a_rebuild_has_the_same_rows(tmp_path):
    from datasets import load_dataset

    options = {"num_train": 300, "num_validation": 20, "num_test": 10, "seed": 3}
    told = build_reasoning(BuildReasoning(task="permutations", out=tmp_path / "a", **options))
    build_reasoning(BuildReasoning(task="permutations", out=tmp_path / "b", **options | {"num_train": 200}))
    sets = [load_dataset(str(tmp_path / name), cache_dir=str(tmp_path / "cache")) for name in "ab"]
    assert {name: len(split) for name, split in sets[0].items()} == {
        "train": 300, "validation": 20, "test": 80, "beyond": 80
    }  # fmt: skip
    assert told["beyond_rows"] == 80
    assert set(sets[0]["test"]["difficulty"]) == set(range(1, 9))
    assert set(sets[0]["beyond"]["difficulty"]) == set(range(9, 17))
    assert set(sets[0]["validation"]["difficulty"]) <= set(range(1, 9))
    # A larger split begins with the rows of a smaller one, and the other splits stay the same.
    assert sets[0]["train"][:200] == sets[1]["train"][:]
    assert sets[0]["beyond"][:] == sets[1]["beyond"][:]
    # With enough different questions, none is in both training and evaluation data.
    seen = {tuple(row) for row in sets[0]["train"]["input_ids"]}
    shared = sum(tuple(ids) in seen for split in ("validation", "test") for ids in sets[0][split]["input_ids"])
    assert shared == 0
    assert load_reasoning_info(tmp_path / "a").beyond == (9, 16)
    with pytest.raises(UsageError, match="other options"):
        build_reasoning(BuildReasoning(task="permutations", out=tmp_path / "a", **options | {"seed": 4}))


def test_small_size_limits_the_difficulties(tmp_path):
    build_reasoning(BuildReasoning(task="pointers", out=tmp_path, size=3, num_train=10, num_test=2))
    info = load_reasoning_info(tmp_path)
    assert info.trained == (1, 2) and info.beyond is None
    assert not (tmp_path / "data" / "beyond-00000.parquet").exists()


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        ("sudoku", {}, "task='sudoku'"),
        ("automaton", {"size": 2}, "size=2"),
        ("maze", {"answers": "all"}, "answers='all'"),
        ("pointers", {"difficulty": "1-8"}, "8 nodes.*7 hops"),
        ("pointers", {"difficulty": "1-4", "beyond": "4-6"}, "beyond=4-6"),
        ("pointers", {"beyond": "5-8"}, "8 nodes.*7 hops"),
        ("addition", {"difficulty": "4-2"}, "4-2"),
        ("addition", {"difficulty": "few"}, "few"),
        ("addition", {"num_train": 0}, "num_train=0"),
        ("maze", {"difficulty": "1-11"}, "6 cells.*10 steps"),
    ],
)
def test_invalid_options_are_named_before_anything_is_written(tmp_path, task, options, said):
    with pytest.raises(UsageError, match=said):
        build_reasoning(BuildReasoning(task=task, out=tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_impossible_difficulty_is_an_error_instead_of_an_endless_search():
    task = TASKS["maze"](size=3)
    with pytest.raises(ValueError, match="difficulty=9"):
        task.draw(9, 1, np.random.default_rng(0))
