"""Functions of the user's own, named by import path: `module:function` or `file.py:function`.

A module is looked for on `sys.path`, then in one folder (by default the current one). A file is loaded under a module
name made from its absolute path, so that every process that resolves the same path sees the same module; a function
crosses to another process as its path, never as a pickle. Whatever stands beside the file or module can be imported
by it: the folder is appended to `sys.path`, behind everything that is there.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncflow.config.names import hint
from asyncflow.errors import ConfigError


def resolve(path: str, folder: str | Path | None = None) -> Callable[..., Any]:
    """Import a function; ConfigError says what was tried."""
    where, name = _split(path)
    module = _file_module(_file(where, folder)) if where.endswith(".py") else _module(where, folder)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(f"{path}: {module.__file__} has no {name!r}{hint(part, names, 'it has')}")
        found = getattr(found, part)
    if isinstance(found, type) or not callable(found):
        raise ConfigError(f"{path}: expected a function, found {type(found).__name__} {name}")
    function: Callable[..., Any] = found
    return function


def fault(path: str, folder: str | Path | None = None) -> str | None:
    """Say what is wrong with an import path without running the user's code; None if nothing is seen to be."""
    try:
        where, name = _split(path)
        file = _file(where, folder) if where.endswith(".py") else _source(where, folder)
    except ConfigError as error:
        return str(error).removeprefix(f"{path}: ").removeprefix(f"{path.rpartition(':')[0]}: ")
    return None if file is None else _name_fault(file, name.split(".")[0])


def anchor(path: str, folders: tuple[Path, ...]) -> str:
    """Turn a file, or a module that only stands in one of `folders`, into an absolute path; others stay."""
    where, colon, name = path.rpartition(":")
    if not colon or not where:
        return path
    if not where.endswith(".py"):
        if "." in where or _on_path(where) is not None:
            return path
        where += ".py"
    for folder in folders:
        if (folder / where).is_file():
            return f"{(folder / where).absolute()}:{name}"
    return path


def _split(path: str) -> tuple[str, str]:
    where, colon, name = path.rpartition(":")
    if not colon or not where or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{path}: expected `module:function` or `file.py:function`")
    return where, name


def _file(where: str, folder: str | Path | None) -> Path:
    file = (Path(folder or ".") / where).absolute()
    if file.is_file():
        return file
    raise ConfigError(f"{where}: {missing(file)}")


def missing(file: Path) -> str:
    """Say that a file or folder does not exist, with the nearest name that does."""
    parent = file.absolute().parent
    if not parent.is_dir():
        return f"the folder {parent} does not exist"
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    return f"{file.name} does not exist in {parent}{hint(file.name, names[:20], 'there are')}"


def _file_module(file: Path) -> ModuleType:
    name = f"asyncflow_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: not a Python file")
    _append(file.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{file}: importing it failed: {_last(error)}") from error
    return module


def _module(where: str, folder: str | Path | None) -> ModuleType:
    top = where.split(".")[0]
    if _on_path(top) is None:
        beside = Path(folder or ".").absolute()
        if _in_folder(top, beside) is None:
            raise ConfigError(f"{where}: {_not_found(where, beside)}")
        _append(beside)
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: importing it failed: {_last(error)}") from error


def _append(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _on_path(top: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module such as __main__ that has no spec
        return None


def _in_folder(top: str, folder: Path) -> importlib.machinery.ModuleSpec | None:
    spec = PathFinder.find_spec(top, [str(folder)])
    return spec if spec is not None and spec.loader is not None else None


def _source(where: str, folder: str | Path | None) -> Path | None:
    """Find the file of a module; None for one that has none, such as a compiled one."""
    beside = Path(folder or ".").absolute()
    top, *parts = where.split(".")
    spec = _on_path(top) or _in_folder(top, beside)
    walked = top
    for part in parts:
        if spec is None:
            break
        loaded = sys.modules.get(walked)
        places = getattr(loaded, "__path__", None) or spec.submodule_search_locations or []
        walked = f"{walked}.{part}"
        spec = PathFinder.find_spec(walked, list(places))
    if spec is None:
        raise ConfigError(f"{where}: {_not_found(where, beside, walked)}")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _not_found(where: str, beside: Path, part: str = "") -> str:
    what = f"no module {part or where.split('.')[0]!r}"
    return f"{what}, neither installed (sys.path of {sys.executable}) nor in {beside}"


def _name_fault(file: Path, name: str) -> str | None:
    try:
        names = _top_names(file, file.stat().st_mtime_ns)
    except SyntaxError as error:
        return f"{file}:{error.lineno}: {error.msg}"
    if names is None or name in names:
        return None
    return f"{file} has no {name!r}{hint(name, sorted(known for known in names if known[0] != '_'), 'it has')}"


@functools.lru_cache(maxsize=64)
def _top_names(file: Path, _changed: int) -> frozenset[str] | None:
    """Names bound at the top of a file; None where they cannot be told, as after `from x import *`."""
    names: set[str] = set()
    for node in ast.parse(file.read_bytes(), str(file)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        else:
            stored = (leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store))
            names.update(leaf.id for leaf in stored)
            names.update(leaf.name for leaf in ast.walk(node) if isinstance(leaf, ast.FunctionDef))
    return None if "*" in names or "__getattr__" in names else frozenset(names)


def _last(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
