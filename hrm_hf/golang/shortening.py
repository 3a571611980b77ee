"""Whether a code says less than the one it was made of: without what is wrong it passes, and nothing is mended."""

from .validators.syntax import leaves, parse


LEAST_SHARE = 0.8  # of the tokens; a repair takes a few away, one that takes a fifth has dropped statements


def is_shortened(code: str, than: str) -> bool:
    """`code` has less than `LEAST_SHARE` of the tokens of `than`, comments apart; either may be broken."""
    return _tokens(code) < LEAST_SHARE * _tokens(than)


def _tokens(code: str) -> int:
    return len(leaves(parse(code).root_node))
