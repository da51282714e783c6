"""Pages that are made from the code, and files that pages name, are there and current."""

import re
from pathlib import Path

import pytest
import yaml

from asyncflow.algorithms.options import BASE, RECIPES
from asyncflow.config.load import load
from asyncflow.config.reference import reference

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_page_is_what_the_code_says():
    assert (ROOT / "docs" / "configuration.md").read_text() == reference()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_pipeline_that_the_readme_shows_is_valid(tmp_path, monkeypatch):
    (block,) = re.findall(r"```yaml\n(model:.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "my_rewards.py").write_text("def closeness(response, answer):\n    return 1.0\n")
    (tmp_path / "pipeline.yaml").write_text(block)
    assert load(["pipeline.yaml"]).pipeline.train.steps == 200


def test_the_settings_that_the_page_on_evaluation_shows_are_valid(tmp_path, monkeypatch):
    (block,) = re.findall(r"```yaml\n(eval:.*?)```", (ROOT / "docs" / "evaluation.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(
        "model: {config: {model_type: qwen2}, tokenizer: characters}\n"
        f"data: {{source: python}}\nreward: {{fn: exact_match}}\n{block}"
    )
    found = load(["pipeline.yaml"]).pipeline
    assert (found.eval.samples, found.eval.k, found.mode) == (8, [1, 8], "async")


def test_the_page_on_algorithms_has_every_recipe_with_its_values_and_every_option():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    for recipe, own in RECIPES.items():
        (row,) = re.findall(rf"^\| `{re.escape(recipe)}` \| (.*) \| .* \|$", page, re.MULTILINE)[:1]
        values = {name: yaml.safe_load(value) for name, value in re.findall(r"`(\w+): ([^`]+)`", row)}
        assert values == own, recipe
    for name in BASE:
        assert f"`{name}" in page, name
