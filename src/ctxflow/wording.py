"""How messages count and name things. Pure.

What does not live here: figures and tables (observe/words.py), durations and rates (batch/words.py).
"""

from __future__ import annotations


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun.

    :param nouns: of several, where an s does not make it.

    >>> counted(1, "call"), counted(1200, "map"), counted(2, "process", "processes")
    ('1 call', '1,200 maps', '2 processes')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def article(noun: str) -> str:
    """Return a noun, such as the name of a type, behind its article.

    >>> article("object"), article("list"), article("MPIJob"), article("function")
    ('an object', 'a list', 'an MPIJob', 'a function')
    """
    spelled = noun[:2].isupper()  # An acronym, which is read letter by letter.
    return f"{'an' if noun[:1] in ('AEFHILMNORSX' if spelled else 'aeiouAEIO') else 'a'} {noun}"
