"""A reward of one's own: how close the response comes to the plural that was asked for."""

from difflib import SequenceMatcher


def closeness(response: str, answer: str, ending: float = 0.3) -> float:
    """1 for the right word; else up to 0.9, for letters in common and for the right last two letters."""
    if response == answer:
        return 1.0
    similar = SequenceMatcher(None, response, answer, autojunk=False).ratio()
    return 0.9 * ((1 - ending) * similar + ending * (response[-2:] == answer[-2:]))
