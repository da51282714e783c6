"""The package list is written by hand; what it leaves out would be missing from a wheel without a word."""

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def settings() -> ConfigParser:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_folder_with_code_is_a_listed_package():
    listed = set(settings()["options"]["packages"].split())
    found = set()
    for top, name in (("asyncflow", "asyncflow"), ("backends", "asyncflow.backends"), ("storage", "asyncflow.storage")):
        for init in (ROOT / top).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / top).parts
            found.add(".".join((name, *inner)))
    assert listed == found


@pytest.mark.parametrize("command", [["--help"], ["--version"], ["schema"]])
def test_the_command_answers_without_loading_anything_heavy(command):
    heavy = "{'torch', 'transformers', 'pyarrow', 'zmq', 'reasoning_gym', 'datasets', 'matplotlib', 'ray'}"
    code = (
        f"import sys; sys.argv = ['asyncflow', *{command!r}]\n"
        "from asyncflow.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"loaded = {heavy} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT, timeout=60)
