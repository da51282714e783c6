"""One process at a time works in the folder of a run: the system lets go of the lock when that process ends."""

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import IO

from asyncflow.errors import CheckpointError

log = logging.getLogger(__name__)
LOCK = ".lock"


class Lock:
    """The right to write into a run's folder."""

    def __init__(self, folder: Path) -> None:
        """Take it, or raise CheckpointError with the process that has it; close it to let go."""
        try:
            file = (folder / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written into: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise CheckpointError(_held(folder, file)) from None
            # Some network file systems know no locks: there the user has to see to it.
            log.warning("%s: %s; nothing keeps a second process from this run", folder, error.strerror)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        self._file = file

    def close(self) -> None:
        """Let go of it; idempotent."""
        self._file.close()


def _held(folder: Path, file: IO[str]) -> str:
    file.seek(0)
    holder = file.read().strip() or "unknown"
    file.close()
    return (
        f"the run in {folder} is still going, in process {holder}: wait for its end, or end it with `kill {holder}`, "
        "after which it can be resumed"
    )
