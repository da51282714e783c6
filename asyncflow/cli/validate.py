"""`asyncflow validate`: every mistake at once, or the graph that the file describes."""

import sys
from collections.abc import Sequence
from pathlib import Path

from asyncflow.config.load import load
from asyncflow.config.model import Pipeline
from asyncflow.errors import AsyncflowError
from asyncflow.stages import Plan, plan

USAGE = 2


def split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Part files from overrides: what holds a `=` and is not a file that exists is an override."""
    files = [argument for argument in arguments if "=" not in argument or _exists(argument)]
    return [Path(file) for file in files], [argument for argument in arguments if argument not in files]


def _exists(argument: str) -> bool:
    try:
        return Path(argument).exists()
    except OSError:  # longer than a file name may be
        return False


def validate(arguments: Sequence[str]) -> int:
    """Print the graph and return 0, or print every mistake and return 2."""
    files, overrides = split(arguments)
    try:
        config = load(files, overrides).pipeline
        found = plan(config)
    except AsyncflowError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE
    sys.stdout.write(describe(config, found))
    return 0


def describe(config: Pipeline, found: Plan) -> str:
    """Show the stages of each table with the columns that pass between them."""
    lines = []
    for name, table in found.tables.items():
        lines.append(f"table {name}")
        for stage in table.stages:
            where = f"{stage.replicas} × process {stage.host}" if stage.host else "thread"
            written = f" → {', '.join(stage.writes)}" if stage.writes else ""
            if stage.build:
                lines.append(f"  {stage.name} [{where}]: {', '.join(stage.reads)}{written}")
            else:
                lines.append(f"  {stage.name}{written}")
    step = f"{config.prompts_per_step} prompts × {config.train.group_size} responses"
    if config.train.supervised:
        step = f"{config.rows_per_step} given answers"
    lines.append(f"valid: {config.train.steps} steps of {step}, mode {config.mode}")
    return "\n".join(lines) + "\n"
