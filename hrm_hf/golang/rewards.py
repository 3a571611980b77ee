"""Verifiable rewards for `training/run_grpo.py`.

    go-syntax        1 if the completion is Go code that parses and declares something, else 0; also 0 if it has less
                     than 80% of the statements of the row's "reference", because an empty function parses too
    go-tests         1 if the completion passes the "tests" of its row (the text of a test file) in the sandbox
    length:TOKENS    1 at TOKENS tokens (end token included), falling linearly to 0 at 0 and 2 * TOKENS
    regex:PATTERN    1 if PATTERN matches anywhere in the text of the completion, else 0

TRL calls a reward with the prompts, the completions (texts, or one message each) and the completion ids of a batch.
The text of a completion contains no special tokens. TRL sums several rewards, weighted by `--reward_weights`. A
program that prints PASS or exits early does not pass its tests (see `validators/go_tests.py`). A test file that does
not parse raises an error.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.hf_argparser import HfArg

from ..models.processing_hrm_go_coder import TOKEN_IDS, is_go_tokenizer
from . import GoProgram, GoTestRunner, best_validator


CODE, END_CODE = TOKEN_IDS["<CODE>"], TOKEN_IDS["</CODE>"]
DECLARATION = re.compile(r"^\s*(func|type|var|const)\b", re.MULTILINE)  # code that declares nothing earns no reward
KINDS = "go-syntax, go-tests, length:TOKENS, regex:PATTERN"


@dataclass
class RewardArguments:
    """Options that select the rewards for completions."""

    reward: list[str] = HfArg(default_factory=list, help=f"One or more rewards: {KINDS}.")

    def __post_init__(self):
        self.reward = [self.reward] if isinstance(self.reward, str) else self.reward
        for name in self.reward:
            _parse(name)


def reward_functions(names: Sequence[str], tokenizer: Any) -> list[Callable[..., list[float]]]:
    """Return the reward functions for TRL.

    Raises:
        ValueError: `names` is empty or contains an unknown name.
        ImportError: go-syntax is used, but neither Go nor tree-sitter is installed.
        GoNotFoundError, SandboxError: go-tests is used, but Go or the sandbox is not available.
    """
    if not names:
        raise ValueError(f"reward=[]: no rewards; pass --reward with one or more of {KINDS}")
    made = []
    for name in names:
        reward = _parse(name)(tokenizer)
        reward.__name__ = name  # TRL logs the reward under this name
        made.append(reward)
    return made


class _GoReward:
    """Base class of the rewards for Go code; it extracts the code from a completion.

    In the Go coder's stream, the code is between <CODE> and </CODE>; <CODE> may be in the prompt. In other texts, the
    code is the prompt followed by the completion. In a conversation, it is the answer.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.tagged = tokenizer, is_go_tokenizer(tokenizer)

    def code_samples(self, prompts: list, completions: list, completion_ids: list) -> list[str | None]:
        """Return the code of each completion, or None if it is unfinished or declares nothing."""
        samples = map(self._code, prompts, completions, completion_ids)
        return [code if code is not None and DECLARATION.search(code) else None for code in samples]

    def _code(self, prompt: Any, completion: Any, ids: list[int]) -> str | None:
        """Return the code of a completion, or None if it is unfinished."""
        begun = prompt if isinstance(prompt, str) else ""
        if not self.tagged:
            return begun + _text(completion)
        begun = begun.rpartition("<CODE>")[2] if "<CODE>" in begun else None
        if CODE in ids:
            begun, ids = "", ids[len(ids) - ids[::-1].index(CODE) :]
        if begun is None or END_CODE not in ids:
            return None
        return begun + self.tokenizer.decode(ids[: ids.index(END_CODE)])


class GoSyntaxReward(_GoReward):
    """Reward for code that parses and, if a row has a reference, is not much shorter than the reference."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.validator = best_validator()

    def __call__(self, *, reference: list[str] | None = None, **batch: Any) -> list[float]:
        from .evaluation.similarity import is_shortened  # imported here because options do not need torch

        samples = self.code_samples(batch["prompts"], batch["completions"], batch["completion_ids"])
        complete = list({code for code in samples if code is not None})
        good = {code for code, feedback in zip(complete, self.validator(complete)) if feedback.syntax_ok}
        references = reference or [""] * len(samples)
        return [float(code in good and not is_shortened(code, full)) for code, full in zip(samples, references)]


class GoTestsReward(_GoReward):
    """Reward for code that passes the tests in its row of the data set, run in the sandbox.

    Raises:
        ValueError: the rows have no tests.
    """

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.runner = GoTestRunner()

    def __call__(self, *, tests: list[str] | None = None, **batch: Any) -> list[float]:
        if tests is None:
            raise ValueError("reward='go-tests': the rows have no tests; add a column `tests` with Go test files")
        samples = self.code_samples(batch["prompts"], batch["completions"], batch["completion_ids"])
        complete = {index: GoProgram(code, tests[index]) for index, code in enumerate(samples) if code is not None}
        passed = {index: run.status == "pass" for index, run in zip(complete, self.runner(list(complete.values())))}
        return [float(passed.get(index, False)) for index in range(len(samples))]


def length_reward(tokens: int) -> Callable[..., list[float]]:
    """Return a reward function that is 1 at `tokens` tokens and falls linearly to 0 at 0 and 2 * `tokens`."""
    return lambda *, completion_ids, **_: [max(0.0, 1 - abs(len(ids) - tokens) / tokens) for ids in completion_ids]


def regex_reward(pattern: str) -> Callable[..., list[float]]:
    """Return a reward function that is 1 if the pattern matches anywhere in the completion, else 0."""
    return lambda *, completions, **_: [float(re.search(pattern, _text(one)) is not None) for one in completions]


GO_REWARDS = {"go-syntax": GoSyntaxReward, "go-tests": GoTestsReward}


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _parse(name: str) -> Callable[[Any], Callable[..., list[float]]]:
    """Parse a reward name, and return a function that creates the reward from a tokenizer."""
    kind, _, value = name.partition(":")
    if name in GO_REWARDS:
        return GO_REWARDS[name]
    if kind == "length":
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"reward={name!r}: must be length:TOKENS with 1 or more tokens, e.g. length:20")
        return lambda tokenizer: length_reward(int(value))
    if kind == "regex" and value:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"reward={name!r}: not a regular expression: {error}") from None
        return lambda tokenizer: regex_reward(value)
    raise ValueError(f"reward={name!r}: must be one of {KINDS}")
