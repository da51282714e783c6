"""The package list is written by hand; what it leaves out would be missing from a wheel without a word."""

import ast
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT, timeout=300)


def declared() -> set[str]:
    options = settings()["options"]["install_requires"]
    extras = "\n".join(settings()["options.extras_require"].values())
    return {canonicalize_name(Requirement(line).name) for line in (options + "\n" + extras).splitlines() if line}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


def test_whatever_the_code_and_the_tests_import_is_a_declared_requirement():
    provides = packages_distributions()
    own = {"asyncflow", "benchmarks", "tests"}
    missing = []
    for top in ("asyncflow", "backends", "storage", "benchmarks", "examples", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            for name in imported(path) - own:
                if not {canonicalize_name(found) for found in provides.get(name, [name])} & declared():
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing


def test_every_declared_requirement_is_pinned():
    pinned = set()
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pinned.add(canonicalize_name(Requirement(line).name))
    assert declared() <= pinned
