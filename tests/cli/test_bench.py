import subprocess
import sys

from asyncflow.cli.bench import bench


def asyncflow(*arguments):
    done = subprocess.run([sys.executable, "-m", "asyncflow", "bench", *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_options_go_to_the_benchmark():
    code, told = asyncflow("queue", "--help")
    assert code == 0
    assert "--peer" in told


def test_an_unknown_benchmark_is_refused_with_those_there_are():
    code, told = asyncflow("nothing")
    assert code == 2
    names = told.partition("there are ")[2].split(", ")
    assert {"durability", "publish", "queue", "quickstart"} <= set(names)
    assert not {"page", "report", "rows", "subjects"} & set(names)


def test_without_a_checkout_it_says_where_benchmarks_are(tmp_path, capsys):
    assert bench("queue", [], tmp_path) == 2
    assert "come with a checkout" in capsys.readouterr().err
