"""Rewards that a program can check, for `training/run_grpo.py`.

    go-syntax        1 if the completion is Go that parses and declares something, else 0; with a "reference" in the
                     row also 0 with less than 80 % of its statements: an empty function parses, too
    go-tests         1 if the completion passes the "tests" of its row (the text of a test file) in the sandbox
    length:TOKENS    1 at that many tokens (the end included), falling to 0 at none and at twice as many
    regex:PATTERN    1 if the expression is found in the text of the completion, else 0

TRL calls a reward with the prompts, completions (texts, or one message each) and completion ids of a batch. The text
of a completion has no special tokens. Several rewards are added, weighted by `--reward_weights`. A program that prints
PASS or exits early does not pass its tests (`validators/go_tests.py`). A test file that does not parse is an error.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.processing_hrm_go_coder import TOKEN_IDS, is_go_tokenizer
from . import GoProgram, GoTestRunner, best_validator
from .evaluation.similarity import is_shortened


CODE, END_CODE = TOKEN_IDS["<CODE>"], TOKEN_IDS["</CODE>"]
DECLARATION = re.compile(r"^\s*(func|type|var|const)\b", re.MULTILINE)  # nothing at all parses too
KINDS = "go-syntax, go-tests, length:TOKENS, regex:PATTERN"


@dataclass
class RewardArguments:
    """The rewards of completions."""

    reward: list[str] = field(
        default_factory=list, metadata={"help": f"What completions are rewarded for: {KINDS}; one or several."}
    )

    def __post_init__(self):
        self.reward = [self.reward] if isinstance(self.reward, str) else self.reward
        for name in self.reward:
            _parse(name)


def reward_functions(names: Sequence[str], tokenizer: Any) -> list[Callable[..., list[float]]]:
    """Return the rewards of these names as TRL takes them.

    Raises:
        ValueError: no name, or an unknown one.
        ImportError: go-syntax with neither Go nor tree-sitter.
        GoNotFoundError, SandboxError: go-tests without Go, or where no sandbox can be made.
    """
    if not names:
        raise ValueError(f"no reward: give --reward with one or several of {KINDS}")
    made = []
    for name in names:
        reward = _parse(name)(tokenizer)
        reward.__name__ = name  # TRL logs it by that
        made.append(reward)
    return made


class _GoReward:
    """Reads the code between <CODE> and </CODE> of the Go coder's stream, which may begin in the prompt.

    The code of other texts is prompt and completion; that of a conversation is the answer.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.tagged = tokenizer, is_go_tokenizer(tokenizer)

    def codes(self, prompts: list, completions: list, completion_ids: list) -> list[str | None]:
        """The code of each completion; None without an end, or without a declaration."""
        codes = map(self._code, prompts, completions, completion_ids)
        return [code if code is not None and DECLARATION.search(code) else None for code in codes]

    def _code(self, prompt: Any, completion: Any, ids: list[int]) -> str | None:
        """The code of a completion; None if it has no end."""
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
    """1 for Go that parses and has the statements of its reference, if there is one."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.validator = best_validator()

    def __call__(self, *, reference: list[str] | None = None, **batch: Any) -> list[float]:
        codes = self.codes(batch["prompts"], batch["completions"], batch["completion_ids"])
        asked = list({code for code in codes if code is not None})
        good = {code for code, said in zip(asked, self.validator(asked)) if said.syntax_ok}
        whole = reference or [""] * len(codes)
        return [float(code in good and not is_shortened(code, than)) for code, than in zip(codes, whole)]


class GoTestsReward(_GoReward):
    """1 for Go that passes the tests of its row, in the sandbox. Raises ValueError for rows without tests."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.runner = GoTestRunner()

    def __call__(self, *, tests: list[str] | None = None, **batch: Any) -> list[float]:
        if tests is None:
            raise ValueError('reward go-tests: rows have no "tests"; give each prompt the text of a Go test file')
        codes = self.codes(batch["prompts"], batch["completions"], batch["completion_ids"])
        asked = {index: GoProgram(code, tests[index]) for index, code in enumerate(codes) if code is not None}
        passed = {index: said.status == "pass" for index, said in zip(asked, self.runner(list(asked.values())))}
        return [float(passed.get(index, False)) for index in range(len(codes))]


def length_reward(tokens: int) -> Callable[..., list[float]]:
    """1 for completions of `tokens` tokens, less by the share that one is longer or shorter."""
    return lambda *, completion_ids, **_: [max(0.0, 1 - abs(len(ids) - tokens) / tokens) for ids in completion_ids]


def regex_reward(pattern: str) -> Callable[..., list[float]]:
    """1 for completions in which the expression is found."""
    return lambda *, completions, **_: [float(re.search(pattern, _text(one)) is not None) for one in completions]


GO_REWARDS = {"go-syntax": GoSyntaxReward, "go-tests": GoTestsReward}


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _parse(name: str) -> Callable[[Any], Callable[..., list[float]]]:
    """What makes a reward, given a tokenizer."""
    kind, _, value = name.partition(":")
    if name in GO_REWARDS:
        return GO_REWARDS[name]
    if kind == "length":
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"reward={name!r}: must be a number of tokens from 1 up; give e.g. length:20")
        return lambda tokenizer: length_reward(int(value))
    if kind == "regex" and value:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"reward={name!r}: not a regular expression: {error}") from None
        return lambda tokenizer: regex_reward(value)
    raise ValueError(f"reward={name!r}: must be one of {KINDS}")
