"""Subcommands: `run`, `resume`, `trace`, `validate`, `schema`, `bench`, `storage start`, `unit`, `inspect` and `keys`.

Exit codes: 0 done, 1 the run failed, 2 the file or the arguments are wrong, 130 interrupted (a checkpoint is left).
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="asyncflow",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Streaming dataflow engine for reinforcement-learning post-training of language models.",
)

Files = Annotated[list[str], typer.Argument(help="Pipeline files (*.yaml), later ones win, and overrides key=value.")]
Keys = Annotated[Path | None, typer.Option(help="Folder that `asyncflow storage keys` has written.")]
Memory = Annotated[str | None, typer.Option(help="Most that cells may use in each process, such as 8GiB.")]
Spill = Annotated[Path | None, typer.Option(help="Folder on a local disk for cells above that.")]
Encrypt = Annotated[bool, typer.Option("--encrypt-bulk", help="With keys: encrypt large batches too, which is slower.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the summary only.")]


@app.command()
def run(
    arguments: Files,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last run of output.folder, if it was interrupted.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run a pipeline: asyncflow run pipeline.yaml train.lr=1e-4."""
    from asyncflow.cli.run import run as command

    raise typer.Exit(command(arguments, resume=resume, quiet=quiet))


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run that was interrupted.")], quiet: Quiet = False
) -> None:
    """Go on from the newest checkpoint of a run."""
    from asyncflow.cli.run import resume as command

    raise typer.Exit(command(folder, quiet=quiet))


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, which may still be going.")],
    output: Annotated[Path | None, typer.Option(help="Where to write it; by default trace.json in the folder.")] = None,
) -> None:
    """Show where the time of a run went, and write its timeline for Perfetto."""
    from asyncflow.cli.trace import trace as command

    raise typer.Exit(command(folder, output))


@app.command()
def validate(arguments: Files) -> None:
    """Report every mistake of a pipeline file, or show the graph of its stages."""
    from asyncflow.cli.validate import validate as command

    raise typer.Exit(command(arguments))


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a page with every key instead.")] = False,
) -> None:
    """Print the JSON schema of a pipeline file, for editors."""
    import json

    from asyncflow.config.reference import reference
    from asyncflow.config.schema import schema as describe

    sys.stdout.write(reference() if markdown else json.dumps(describe(), indent=1) + "\n")


@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
def bench(
    name: Annotated[str, typer.Argument(help="queue, durability, soak, quickstart.")],
    options: Annotated[list[str] | None, typer.Argument(help="Options of the benchmark; --help tells them.")] = None,
) -> None:
    """Run a benchmark of the checkout, and write its result: asyncflow bench queue --quick."""
    from asyncflow.cli.bench import bench as command

    raise typer.Exit(command(name, options or []))


storage = typer.Typer(no_args_is_help=True, help="The TransferQueue alone: serve one, or look at one.")
app.add_typer(storage, name="storage")


@storage.command()
def start(
    url: Annotated[str, typer.Option(help="Where to serve it: ipc:///path, tcp://127.0.0.1:port or, with keys, any.")],
    keys: Keys = None,
    units: Annotated[int, typer.Option(min=0, max=255, help="Processes that hold the cells; 0: this one does.")] = 0,
    restore: Annotated[Path | None, typer.Option(help="Begin with the snapshot in this folder.")] = None,
    durability: Annotated[
        str, typer.Option(help="memory, journal (survives a crash of the process) or fsync (and a loss of power).")
    ] = "memory",
    folder: Annotated[str | None, typer.Option(help="Where its log is; one that is there is gone on with.")] = None,
    memory: Memory = None,
    spill: Spill = None,
    encrypt_bulk: Encrypt = False,
) -> None:
    """Serve a queue until Ctrl-C or SIGTERM, and print its address once it accepts."""
    from asyncflow.cli.storage import start as command

    raise typer.Exit(command(url, keys, units, restore, durability, folder, memory, spill, encrypt_bulk))


@storage.command()
def unit(
    queue: Annotated[str, typer.Argument(help="Address of the queue.")],
    url: Annotated[str, typer.Option(help="Where clients reach the unit: ipc:///path or tcp://127.0.0.1:port.")],
    keys: Keys = None,
    memory: Memory = None,
    spill: Spill = None,
    encrypt_bulk: Encrypt = False,
) -> None:
    """Hold cells for a queue that was started with units, until it ends: one more unit, on this or another host."""
    from asyncflow.cli.storage import unit as command

    raise typer.Exit(command(queue, url, keys, memory, spill, encrypt_bulk))


@storage.command()
def inspect(
    url: Annotated[str, typer.Argument(help="Address of the queue.")],
    keys: Keys = None,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print it in Prometheus' text format.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the queue.")] = 10.0,
) -> None:
    """Show tables, what each task has to do, and who waits for what: asyncflow storage inspect ipc:///tmp/queue."""
    from asyncflow.cli.storage import inspect as command

    raise typer.Exit(command(url, keys=keys, prometheus=prometheus, timeout=timeout))


@storage.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")],
    client: Annotated[str, typer.Option(help="Name of the client that is let in.")] = "client",
) -> None:
    """Write the keys of a queue that other hosts use, and of one client: asyncflow storage keys keys."""
    from asyncflow.cli.storage import keys as command

    raise typer.Exit(command(folder, client))


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Streaming dataflow engine for reinforcement-learning post-training of language models."""
    if show:
        from asyncflow import __version__

        typer.echo(f"asyncflow {__version__}")
        raise typer.Exit
