"""Who may import whom: read from the code, not from what happens to be loaded."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"asyncflow": "asyncflow", "backends": "asyncflow.backends", "storage": "asyncflow.storage"}
ENGINES = {"torch", "transformers", "vllm", "sglang", "megatron", "ray"}

RULES = {
    "asyncflow.errors": set(),
    "asyncflow.types": set(),
    "asyncflow.storage": {"asyncflow.errors", "asyncflow.types"},
    "asyncflow.backends.base": {"asyncflow.types", "asyncflow.errors", "asyncflow.storage.batch"},
    "asyncflow.staleness": {"asyncflow.errors", "asyncflow.types", "asyncflow.storage.batch"},
    "asyncflow.pipeline": {"asyncflow.errors"},
    "asyncflow.config": {
        "asyncflow.errors",
        "asyncflow.types",
        "asyncflow.algorithms.options",
        "asyncflow.rewards.signature",
        "asyncflow.data.template",
    },
}


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *inner)).removesuffix(".__init__")
            found[name] = path
    return found


def imported(path: Path, *, at_top: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    names = set()
    for node in tree.body if at_top else ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", RULES)
def test_a_package_imports_only_what_it_may(package):
    for name, path in modules().items():
        if within(name, package):
            ours = {other for other in imported(path) if within(other, "asyncflow") and other != "asyncflow"}
            foreign = {
                other for other in ours if not any(within(other, allowed) for allowed in {package, *RULES[package]})
            }
            assert not foreign, f"{name} imports {foreign}"


@pytest.mark.parametrize(
    "package", ["asyncflow.storage", "asyncflow.config", "asyncflow.cli", "asyncflow.execute", "asyncflow.weights"]
)
def test_engine_libraries_are_imported_on_use_only(package):
    for name, path in modules().items():
        if within(name, package):
            tops = {other.partition(".")[0] for other in imported(path, at_top=True)}
            assert not tops & ENGINES, f"{name} imports {tops & ENGINES} at its top"


def test_nobody_imports_the_command_line_or_an_engine_adapter_directly():
    for name, path in modules().items():
        names = imported(path)
        if not within(name, "asyncflow.cli") and name != "asyncflow.__main__":
            assert not {other for other in names if within(other, "asyncflow.cli")}, name
        if not within(name, "asyncflow.backends"):
            adapters = ("asyncflow.backends.infer", "asyncflow.backends.train")
            assert not {
                other
                for other in names
                if any(within(other, adapter + "s") or other.startswith(adapter + ".") for adapter in adapters)
            }, name
