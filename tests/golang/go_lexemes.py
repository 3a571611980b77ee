"""Whether a text is lexically Go, by the productions of the Go specification as regular expressions.

The referee of the byte-wise lexer. It shares nothing with it: it sees the whole text, as characters, takes the longest
lexeme, and judges it.
"""

import re
import unicodedata


ESCAPE = (
    r"\\(?:[abfnrtv\\QUOTE]|[0-3][0-7]{2}|x[0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|U00(?:0[1-9a-fA-F]|10)[0-9a-fA-F]{4}|U0000(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
# In order; letters beyond ASCII have become µ, digits ٣, and all else €.
LEXEMES = {
    "space": r"[ \t\r\n]+",
    "line comment": r"//[^\n]*",
    "comment": r"/\*.*?\*/",
    "raw": r"`[^`]*`",
    "string": r'"(?:[^"\\\n]|' + ESCAPE.replace("QUOTE", '"') + ')*"',
    "rune": r"'(?:[^'\\\n]|" + ESCAPE.replace("QUOTE", "'") + ")'",
    "number": (
        r"0[xX][0-9a-fA-F_]*(?:\.[0-9a-fA-F_]*)?(?:[pP][+-]?[0-9_]*)?i?"
        r"|0[bBoO][0-9_]*(?:\.[0-9_]*)?(?:[eEpP][+-]?[0-9_]*)?i?"
        r"|(?<!\.\.)(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eEpP][+-]?[0-9_]*)?i?"
        r"|(?<=\.\.\.)[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eEpP][+-]?[0-9_]*)?i?"
    ),
    "name": r"[A-Za-z_µ][A-Za-z0-9_µ٣]*",
    "operator": r"\.\.\.|[-+*/%&|^<>=!:;,.~()\[\]{}]",
}  # fmt: skip
LEXEME = re.compile("|".join(f"(?P<{name.replace(' ', '_')}>{part})" for name, part in LEXEMES.items()), re.DOTALL)
DECIMAL, HEX = r"[0-9](?:_?[0-9])*", r"[0-9a-fA-F](?:_?[0-9a-fA-F])*"
NUMBER = re.compile(
    rf"0[xX]_?{HEX}i?|0[xX](?:_?{HEX}\.?(?:{HEX})?|\.{HEX})[pP][+-]?{DECIMAL}i?"
    r"|0[bB](?:_?[01])+i?|0[oO](?:_?[0-7])+i?|0(?:_?[0-7])*|[1-9](?:_?[0-9])*"
    rf"|{DECIMAL}i|(?:{DECIMAL}\.(?:{DECIMAL})?(?:[eE][+-]?{DECIMAL})?|{DECIMAL}[eE][+-]?{DECIMAL}"
    rf"|\.{DECIMAL}(?:[eE][+-]?{DECIMAL})?)i?"
)
PAIRS = {")": "(", "]": "[", "}": "{"}


def is_lexical(text: str, balanced: bool = True) -> bool:
    """Every lexeme is one of Go's, and every bracket closes the last that is open; if `balanced`, none stays open."""
    if re.search("[\0\ufeff\ud800-\udfff]", text):
        return False
    text = "".join(character if character < "\x80" else _class(character) for character in text)
    at, opened = 0, []
    while at < len(text):
        found = LEXEME.match(text, at)
        if found is None or (found["number"] and not NUMBER.fullmatch(found["number"])):
            return False
        if found[0] == "/" and text.startswith("/*", at):  # a comment without an end
            return False
        if found[0] in PAIRS.values():
            opened.append(found[0])
        elif found[0] in PAIRS and (not opened or opened.pop() != PAIRS[found[0]]):
            return False
        at = found.end()
    return not (balanced and opened)


def _class(character: str) -> str:
    category = unicodedata.category(character)
    return "µ" if category in ("Lu", "Ll", "Lt", "Lm", "Lo") else "٣" if category == "Nd" else "€"
