"""Numbers with their nouns, in what is printed."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 board`, `2 boards`, `10,000 boards`; `plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
