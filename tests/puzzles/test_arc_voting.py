"""ARC voting on hand-made predictions with known scores."""

import json

import numpy as np
import pytest

from hrm_hf.puzzles.arc_grids import apply_augmentation, encode_grid, identifier_name
from hrm_hf.puzzles.arc_pipeline import ArcVoting, load_test_puzzles


QUESTION_A, QUESTION_B, QUESTION_C = [[1, 2, 3]], [[4], [5]], [[6, 6], [7, 0]]
RIGHT, WRONG, OTHER = [[1, 0], [2, 3]], [[9, 9], [9, 8]], [[5]]
PUZZLES = {
    "one": {"train": [], "test": [{"input": QUESTION_A, "output": RIGHT}]},
    "two": {
        "train": [],
        "test": [{"input": QUESTION_B, "output": RIGHT}, {"input": QUESTION_C, "output": [[7, 7, 7]]}],
    },
}
RNG = np.random.default_rng(0)
NAMES = ["<blank>"] + [
    name
    for task in PUZZLES
    for name in (task, *(identifier_name(task, k, [0, *(RNG.permutation(9) + 1)]) for k in range(8)))
]


def vote(votes: ArcVoting, *ballots) -> int:
    """Add ballots `(identifier, question, answer, q)` under the identifier's augmentation."""
    identifiers = [ballot[0] for ballot in ballots]

    def rows(grids):
        shown = [apply_augmentation(np.array(grid), NAMES[i]) for i, grid in zip(identifiers, grids)]
        return np.stack([encode_grid(grid) for grid in shown])

    questions, answers, q = (list(column) for column in list(zip(*ballots))[1:])
    return votes.update(rows(questions), np.array(identifiers), rows(answers), np.array(q, dtype=np.float32))


@pytest.fixture
def votes() -> ArcVoting:
    return ArcVoting(PUZZLES, NAMES)


def test_equal_answers_under_different_augmentations_are_votes_for_one_candidate(votes):
    assert vote(votes, *((i, QUESTION_A, RIGHT, 0.0) for i in range(1, 10))) == 9
    (best,) = votes.candidates("one", 0)
    assert (best.grid.tolist(), best.votes, best.mean_q) == (RIGHT, 9, 0.5)


def test_more_votes_win_over_higher_confidence(votes):
    vote(votes, (1, QUESTION_A, WRONG, 9.0), (2, QUESTION_A, RIGHT, -9.0), (3, QUESTION_A, RIGHT, -9.0))
    assert [found.grid.tolist() for found in votes.candidates("one", 0)] == [RIGHT, WRONG]


def test_mean_confidence_breaks_ties(votes):
    vote(votes, (1, QUESTION_A, WRONG, 1.0), (2, QUESTION_A, RIGHT, 2.0))
    best, second = votes.candidates("one", 0)
    assert best.grid.tolist() == RIGHT and second.mean_q == pytest.approx(1 / (1 + np.exp(-1.0)))


def test_both_scores_match_a_hand_made_example(votes):
    # "one": correct answer ranked second. "two": first input solved by the top answer, second input never.
    vote(votes, (1, QUESTION_A, WRONG, 3.0), (2, QUESTION_A, WRONG, 3.0), (3, QUESTION_A, RIGHT, 3.0))
    vote(votes, (10, QUESTION_B, RIGHT, 0.0), (11, QUESTION_C, WRONG, 0.0))
    result = votes.result(ks=(1, 2))
    assert (result["hrm/pass@1"], result["hrm/pass@2"]) == (0.0, 0.5)
    assert (result["trm/pass@1"], result["trm/pass@2"]) == (0.25, 0.75)
    assert (result["tasks"], result["test_inputs"], result["test_inputs_without_votes"]) == (2, 3, 0)


def test_test_inputs_without_votes_are_wrong_and_counted(votes):
    vote(votes, (1, QUESTION_A, RIGHT, 0.0))
    result = votes.result()
    assert result["trm/pass@1"] == result["hrm/pass@1000"] == 0.5
    assert result["test_inputs_without_votes"] == 2


def test_votes_of_several_evaluations_accumulate(votes):
    vote(votes, (1, QUESTION_A, WRONG, 5.0), (2, QUESTION_A, RIGHT, 0.0))
    assert votes.result((1,))["trm/pass@1"] == 0.0
    vote(votes, (3, QUESTION_A, RIGHT, 0.0))
    assert votes.result((1,))["trm/pass@1"] == 0.5


def test_the_order_of_rows_does_not_change_the_ranking():
    ballots = [(1, QUESTION_A, RIGHT, 0.0), (2, QUESTION_A, WRONG, 0.0), (3, QUESTION_A, OTHER, 0.0)]
    orders = []
    for order in (ballots, ballots[::-1]):
        votes = ArcVoting(PUZZLES, NAMES)
        vote(votes, *order)
        orders.append([found.grid.tolist() for found in votes.candidates("one", 0)])
    assert orders[0] == orders[1]


def test_rows_that_only_pad_the_batch_do_not_vote(votes):
    zeros = np.zeros((3, 900), dtype=np.int64)
    assert votes.update(zeros, np.zeros(3, dtype=int), zeros, np.full(3, np.nan)) == 0


def test_hidden_tests_give_no_score():
    votes = ArcVoting({"one": {"train": [], "test": [{"input": QUESTION_A}]}}, NAMES)
    vote(votes, (4, QUESTION_A, RIGHT, 0.0))
    with pytest.raises(ValueError, match=r"no task .*solutions"):
        votes.result()


def test_voting_rejects_rows_of_the_train_split(votes):
    with pytest.raises(ValueError, match=r"row 0: .*task 'one'"):
        vote(votes, (1, [[8, 8]], RIGHT, 0.0))


def test_an_unknown_identifier_is_rejected(votes):
    row = encode_grid(np.array(QUESTION_A))[None]
    with pytest.raises(ValueError, match=r"identifier 99: .*18"):
        votes.update(row, np.array([99]), row, np.zeros(1))


def test_nan_is_rejected(votes):
    rows = np.zeros((2, 900), dtype=int)
    with pytest.raises(ValueError, match=r"q_halt_logits .*NaN"):
        votes.update(rows, np.ones(2, int), rows, np.full(2, np.nan))


def test_test_puzzles_are_read_from_the_data_set_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"test_puzzles\.json .*hrm-hf data arc"):
        load_test_puzzles(tmp_path)
    (tmp_path / "test_puzzles.json").write_text(json.dumps(PUZZLES))
    assert load_test_puzzles(tmp_path) == PUZZLES
