"""Whole runs of a model so small that most of their time goes into starting processes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

WORDS = [first + second + third for first in "bdm" for second in "aeiou" for third in "gt"]


def settings(folder: Path) -> dict[str, object]:
    """A pipeline on a file of prompts in this folder, with a reward function in a file beside it."""
    (folder / "words.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in WORDS))
    (folder / "rewards.py").write_text(
        "def first_letter(response, word):\n    return float(response[:1] == word[0]) + 0.1 * len(set(response))\n"
    )
    shape = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }
    return {
        "model": {"config": shape, "tokenizer": "characters"},
        "data": {"source": "jsonl:words.jsonl", "prompt": "{word}:", "answer": "{word}", "max_prompt_tokens": 8},
        "eval": {"rows": 6, "correct_at": 1.0},
        "warmup": {"steps": 2, "rows_per_step": 8},
        "rollout": {"max_response_tokens": 4},
        "reward": {"fn": "rewards.py:first_letter"},
        "train": {"group_size": 4, "prompts_per_step": 4, "steps": 3, "lr": 1e-3, "token_budget": 64},
        "mode": "colocated",
        "executor": {"threads": 1},
        "output": {"folder": str(folder / "run"), "samples_every": 1},
    }


def merged(base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    both = dict(base)
    for key, value in changes.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., Path]:
    """Write a pipeline file with some changes and return its path."""

    def write(**changes: object) -> Path:
        path = tmp_path / "pipeline.yaml"
        path.write_text(yaml.safe_dump(merged(settings(tmp_path), changes)))
        return path

    return write


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a module with inference engines, as a package would; runs then work in its folder.

    Each engine has the name of its class in small letters; without names there is one, that of the module.
    """

    def install(module: str, text: str, *names: str) -> None:
        (tmp_path / f"{module}.py").write_text(text)
        about = tmp_path / f"{module}-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        points = [f"{name} = {module}:{name.capitalize()}\n" for name in names or (module,)]
        (about / "entry_points.txt").write_text("".join(["[asyncflow.infer]\n", *points]))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)

    return install
