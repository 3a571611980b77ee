"""How replies of a recursive language model are read."""

import pytest

from hrm_hf.text.rlm.prompts import parse_reply


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("```python\nx = 1\n```", "code", "x = 1\n"),
        ("```json\nFINAL(1)\n```\nwell", "nothing", ""),
        ("```repl\nFINAL(1)\n", "open_block", ""),
        ("I will call FINAL(x) later", "nothing", ""),
        ("<think>\nFINAL(1)\n```repl\n1\n```\n</think>\nFINAL(2)", "final", "2"),
        ("FINAL(1)\n```repl\nx\n```", "final", "1"),
        ('FINAL("""two\nlines""")', "final", "two\nlines"),
        ("FINAL(open", "final", "open"),
        ("", "nothing", ""),
    ],
)
def test_replies_are_read_as_they_are_meant(text, kind, value):
    reply = parse_reply(text)
    assert (reply.kind, reply.value) == (kind, value)
