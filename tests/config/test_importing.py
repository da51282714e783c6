import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.config.importing import anchor, fault, resolve
from asyncflow.errors import ConfigError


@pytest.fixture
def user(tmp_path):
    """A folder with a module, a helper beside it and a package, which no other test uses."""
    tag = tmp_path.name.replace("-", "_")
    (tmp_path / f"helper_{tag}.py").write_text("VALUE = 7\n")
    (tmp_path / f"mod_{tag}.py").write_text(
        f"from helper_{tag} import VALUE\nn = 3\ndef f(response): return VALUE\n"
        "class C:\n  @staticmethod\n  def g(x): return x\n"
    )
    (tmp_path / f"pkg_{tag}").mkdir()
    (tmp_path / f"pkg_{tag}" / "__init__.py").write_text("")
    (tmp_path / f"pkg_{tag}" / "sub.py").write_text("def f(): return 'sub'\n")
    yield tmp_path, tag
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def test_files_modules_and_packages_are_found(user):
    folder, tag = user
    assert resolve(f"mod_{tag}.py:f", folder)("") == 7
    assert resolve(f"{folder}/mod_{tag}.py:C.g")(5) == 5
    assert resolve(f"mod_{tag}:f", folder)("") == 7
    assert resolve(f"pkg_{tag}.sub:f", folder)() == "sub"
    assert resolve("json:dumps")([]) == "[]"


def test_a_file_is_loaded_once_under_a_name_of_its_own(user):
    folder, tag = user
    function = resolve(f"{folder}/mod_{tag}.py:f")
    assert resolve(f"mod_{tag}.py:f", folder) is function
    assert function.__module__.startswith(f"asyncflow_user_mod_{tag}_")
    assert pickle.loads(pickle.dumps(function)) is function


def test_the_name_of_a_files_module_is_the_same_in_another_process(user):
    folder, tag = user
    path = f"{folder}/mod_{tag}.py:f"
    code = f"from asyncflow.config.importing import resolve; print(resolve({path!r}).__module__)"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": root}, check=True
    )
    assert done.stdout.strip() == resolve(path).__module__


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mod_TAG.py:ff", "has no 'ff'"),
        ("mod_TAG.py:n", "expected a function, found int n"),
        ("mod_TAG.py:C", "expected a function, found type C"),
        ("mod_TAG.py:C.h", "has no 'C.h'"),
        ("mod_tga.py:f", "does not exist in"),
        ("nowhere/mod.py:f", "the folder .*nowhere does not exist"),
        ("modd_TAG:f", "no module 'modd_.*', neither installed .* nor in "),
        ("f", "expected `module:function` or `file.py:function`"),
        (":f", "expected `module:function`"),
        ("a.py:", "expected `module:function`"),
    ],
)
def test_what_cannot_be_resolved_says_what_was_tried(user, path, message):
    folder, tag = user
    with pytest.raises(ConfigError, match=message):
        resolve(path.replace("TAG", tag), folder)


@pytest.mark.parametrize("text", ["raise ValueError('no')", "def f(:", "import no_such_module_at_all"])
def test_a_module_that_fails_to_import_is_named_with_its_error_and_can_be_mended(tmp_path, text):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(
        ConfigError, match=r"broken.py: importing it failed: (ValueError|SyntaxError|ModuleNotFoundError): "
    ):
        resolve(f"{file}:f")
    file.write_text("def f(): return 1\n# a different size, so that no stale bytecode fits\n")
    assert resolve(f"{file}:f")() == 1


def test_faults_are_seen_without_running_the_code(tmp_path):
    (tmp_path / "loud.py").write_text("raise SystemExit\ndef f(): pass\ng = f\n")
    (tmp_path / "open.py").write_text("from os.path import *\n")
    assert fault("loud.py:f", tmp_path) is None
    assert fault("loud.py:g", tmp_path) is None
    assert fault("open.py:join", tmp_path) is None
    assert fault("zlib:compress") is None
    assert "has no 'h'; it has: f, g" in fault("loud.py:h", tmp_path)


def test_what_stands_in_a_folder_becomes_absolute(user):
    folder, tag = user
    assert anchor(f"mod_{tag}.py:f", (folder,)) == f"{folder}/mod_{tag}.py:f"
    assert anchor(f"mod_{tag}:f", (Path("/nowhere"), folder)) == f"{folder}/mod_{tag}.py:f"
    for unchanged in ("json:dumps", f"pkg_{tag}.sub:f", "nowhere.py:f", "exact_match"):
        assert anchor(unchanged, (folder,)) == unchanged
