import pytest
import yaml

GOOD = {
    "model": {"config": {"model_type": "llama"}, "tokenizer": "characters"},
    "data": {"source": "python"},
    "reward": {"fn": "exact_match"},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def good(folder):
    """A small valid file in the current folder."""
    (folder / "good.yaml").write_text(yaml.safe_dump(GOOD))
    return "good.yaml"


@pytest.fixture
def check_lines(good):
    """Return the problems of the good file with overrides."""
    from asyncflow.config.load import load
    from asyncflow.errors import ConfigError

    def lines(*overrides):
        try:
            load(good, overrides)
        except ConfigError as error:
            return [line.removeprefix("override ").partition(": ")[2] for line in error.problems]
        return []

    return lines
