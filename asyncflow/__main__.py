"""`python -m asyncflow` is the command `asyncflow`."""

from asyncflow.cli import main

main()
