"""Constrained decoding at the lexical level of Go, with any causal language model.

    model.generate(**prompt, logits_processor=[GoLexicalLogitsProcessor(tokenizer)])
    pipeline("text-generation", model)(prompt, logits_processor=[GoLexicalLogitsProcessor(tokenizer)])

No token can be written that makes the text impossible in Go (`lexer.py`): a `$` outside of strings, a newline within
one, an unknown escape, a bracket that closes another kind. Whether a token is possible depends on the place at which
the text is and, for few, on the open brackets: one mask for each place, made when it is first needed, serves all rows.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ..models.logits_process_hrm_go_coder import forbid
from ..models.processing_hrm_go_coder import TOKEN_IDS, is_go_tokenizer, token_bytes
from .lexer import BRACKETS, CLOSES, CODE, IMPOSSIBLE, LexicalState, automaton


MAX_MASKS = 1024  # kept at a time; a byte for each token of the vocabulary


class GoLexicalLogitsProcessor(LogitsProcessor):
    """Forbids the tokens with which the text of a row could not be Go any more.

    The text of a row is what stands behind its last special token (<s>, padding, <CODE>, </PROBLEM>), so that a given
    beginning of the code counts, and a batch may be padded. No special token is written but those that end a text, and
    these only outside of strings, runes and comments. Given text is never refused: what cannot be Go in it is passed
    over, and if it closes more brackets than it opened, so may what is written.

    Where nothing would be left in a row (other processors forbade the rest), its scores stay as they are.

    One instance serves any number of calls, batches and beams: states are kept by the ids of a row, not by its place.

    Args:
        tokenizer: of the model; byte-level BPE, or SentencePiece as Llama's.
        prompt_length: tokens of each row, padding included, that are not Go.
        balanced: the text may end only with all brackets closed. For whole declarations; a model that never closes
            them writes on to its budget. Not the default, since a fragment that is continued need not be complete.
        end_ids: tokens that end a text; by default the tokenizer's end of text, and </CODE> of the Go coder's.

    Raises:
        ValueError: a tokenizer whose tokens are neither kind of bytes.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_length: int = 0,
        *,
        balanced: bool = False,
        end_ids: Collection[int] | None = None,
    ):
        self.texts = token_bytes(tokenizer)
        self.prompt_length, self.balanced = prompt_length, balanced
        if end_ids is None:
            ends = {tokenizer.eos_token_id, TOKEN_IDS["</CODE>"] if is_go_tokenizer(tokenizer) else None}
            end_ids = ends - {None}
        self.end_ids = sorted(end_ids)
        self._tokens = _TokenTable(self.texts)
        self._masks: dict[tuple, torch.Tensor] = {}
        self._states: dict[tuple[int, ...], LexicalState] = {}

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        allowed = torch.stack([self.allowed(state) for state in self.states(input_ids)])
        forbidden = torch.ones_like(scores, dtype=torch.bool)  # logits may be more than there are tokens, or fewer
        width = min(scores.shape[1], allowed.shape[1])
        forbidden[:, :width] = ~allowed[:, :width].to(scores.device)
        return forbid(scores, forbidden)

    def states(self, input_ids: torch.LongTensor) -> list[LexicalState]:
        """The lexer's state behind each row of [B, S] ids."""
        rows = [tuple(row) for row in input_ids[:, self.prompt_length :].tolist()]
        before, self._states = self._states, {}
        for row in rows:
            if row not in self._states:
                known = before.get(row[:-1]) if row else None
                state, new = (LexicalState(), row) if known is None else (known, row[-1:])
                for token in new:
                    text = self.texts[token] if token < len(self.texts) else None
                    state = LexicalState() if text is None else state.read(text)
                self._states[row] = state
        return [self._states[row] for row in rows]

    def allowed(self, state: LexicalState) -> torch.Tensor:
        """The tokens [V] that may follow a state, True where one may."""
        possible, kinds, closings = self._tokens.at(state.place)
        fitting = tuple(_closes(state, closing) for closing in closings)
        key = state.place, fitting, state.may_end(self.balanced)
        if key not in self._masks:
            if len(self._masks) >= MAX_MASKS:
                self._masks.clear()
            mask = torch.from_numpy(possible & np.array(fitting)[kinds])
            mask[self.end_ids] = key[-1]
            self._masks[key] = mask
        return self._masks[key]


def _closes(state: LexicalState, closing: str) -> bool:
    """Whether a text may close these brackets, given by what opened them, the innermost first."""
    opened = state.opened[::-1][: len(closing)]
    return closing.startswith(opened) and (len(opened) == len(closing) or state.fragment)


class _TokenTable:
    """The effect of every token of a vocabulary at a place of the lexer, computed for all at once when asked for.

    Args:
        texts: bytes of each token, None for those that are no text.
    """

    def __init__(self, texts: list[bytes | None]):
        self.texts = texts
        lengths = np.array([len(text or b"") for text in texts])
        self.order = np.argsort(-lengths, kind="stable")  # the longest first: those with an n-th byte are in front
        self.bytes = np.zeros((len(texts), lengths.max()), dtype=np.uint8)
        for row, token in enumerate(self.order):
            self.bytes[row, : lengths[token]] = np.frombuffer(texts[token] or b"", dtype=np.uint8)
        self.reaching = [int((lengths > column).sum()) for column in range(lengths.max())]
        self.text = np.array([bool(text) for text in texts])
        self.found: dict[int, tuple[np.ndarray, np.ndarray, list[str]]] = {}

    def at(self, place: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """For a place: which tokens [V] are possible there, how each closes brackets [V], as an index of the last."""
        if place not in self.found:
            self.found[place] = self._run(place)
        return self.found[place]

    def _run(self, place: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        table, is_bracket = automaton().table, np.isin(np.arange(256), list(BRACKETS))
        places = np.full(len(self.texts), place)
        brackets = np.zeros(len(self.texts), dtype=bool)
        for column, count in enumerate(self.reaching):
            byte = self.bytes[:count, column]
            places[:count] = table[places[:count], byte]
            brackets[:count] |= is_bracket[byte] & (places[:count] == CODE)
        possible, kinds, closings = np.zeros_like(brackets), np.zeros(len(self.texts), dtype=np.int64), [""]
        possible[self.order] = places != IMPOSSIBLE
        possible &= self.text
        for token in self.order[brackets & (places != IMPOSSIBLE)]:
            closing = _closing(place, self.texts[token])
            possible[token] = closing is not None
            if closing:
                if closing not in closings:
                    closings.append(closing)
                kinds[token] = closings.index(closing)
        return possible, kinds, closings


def _closing(place: int, text: bytes) -> str | None:
    """The brackets that a text closes, by what must have opened them, the innermost first; None: it is no Go."""
    state, closing = LexicalState(place, "", fragment=True), ""
    for byte in text:
        behind = state.step(byte)
        if behind is None:
            return None
        if byte in CLOSES and behind.place == CODE and not state.opened:
            closing += CLOSES[byte]
        state = behind
    return closing
