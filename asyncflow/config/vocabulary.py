"""How many tokens a model knows, as far as its configuration says: read as JSON, without the libraries of engines."""

import json
from pathlib import Path
from typing import Any

from asyncflow.config.model import Model

SPECIALS = ("<pad>", "<eos>", "<unk>")
"""Tokens that the `characters` tokenizer has beside its alphabet."""


def size(folder: str | Path) -> int | None:
    """Return how many tokens the model of a folder knows; None if its `config.json` does not say."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _size(found) if isinstance(found, dict) else None


def own_size(model: Model) -> int | None:
    """Return how many tokens the policy knows; None if only its tokenizer could tell."""
    if model.config is not None and "vocab_size" in model.config:
        return _size(model.config)
    if model.config is not None:
        return len(SPECIALS) + len(model.characters) if model.tokenizer == "characters" else None
    return size(model.path) if model.path else None


def _size(config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    found = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return found if isinstance(found, int) else None
