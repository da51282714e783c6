"""The command `asyncflow`. Each subcommand loads what it needs when it runs, so that `--help` answers at once."""

from asyncflow.cli.app import app


def main() -> None:
    """Run the command line."""
    app()


__all__ = ["app", "main"]
