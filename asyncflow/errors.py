"""Every error that asyncflow raises on purpose, in one tree.

    AsyncflowError
    ├── ConfigError (ValueError)           the file or an option is wrong; carries every mistake found
    ├── MissingDependency (ImportError)    a package is not installed; carries the command that installs it
    ├── PipelineError (ValueError)         the stages do not form a graph
    ├── DataError (ValueError)             a prompt, a row or a file of them is unusable
    ├── RewardError (RuntimeError)         the user's reward function failed
    ├── WeightsError (RuntimeError)        weights could not be published, verified or applied
    ├── CheckpointError (RuntimeError)     a checkpoint is missing, foreign or incomplete
    ├── ReplicaFailed (RuntimeError)       a running copy of a stage ended with an error
    ├── StalenessExceeded (RuntimeError)   a row older than the bound reached the trainer
    └── StorageError
        ├── SchemaError (ValueError)       a column, dtype or length does not fit the table
        ├── RowGone (LookupError)          a row that was retired, dropped or never existed
        ├── ColumnMissing (LookupError)    a column that is not written for a row
        ├── CellConflict (ValueError)      a different value for a cell that is already written
        ├── LeaseLost (RuntimeError)       an acknowledgement or write under a lease that is over
        ├── CapacityExceeded (RuntimeError)  one put is larger than the whole table may be
        ├── QueueClosed (RuntimeError)     the queue, table or stream was closed
        ├── QueueFailed (RuntimeError)     a producer failed; carries its error
        ├── AccessDenied (PermissionError)  keys that are missing, or that the other end does not know
        ├── WireError (ValueError)         a message that is malformed, oversized or unknown
        └── WaitTimeout (TimeoutError)     a bounded wait ended; names who waited for what

Each class is picklable, since errors cross processes: `args` holds all of its state.
"""


class AsyncflowError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AsyncflowError, ValueError):
    """The configuration is wrong.

    `problems` holds one line for each mistake: `file:line:column: path: what, expected, what to do`.
    """

    def __init__(self, problems: tuple[str, ...] | list[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class MissingDependency(AsyncflowError, ImportError):
    """A package that this option needs is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(package, needed_for, install)
        self.package, self.needed_for, self.install = package, needed_for, install

    def __str__(self) -> str:
        return f"{self.needed_for} needs the package {self.package}, which is not installed: {self.install}"


class PipelineError(AsyncflowError, ValueError):
    """The stages do not form a graph: a column nobody writes, two writers of one column, or a cycle."""


class DataError(AsyncflowError, ValueError):
    """A prompt, a row or a file of them is unusable."""


class RewardError(AsyncflowError, RuntimeError):
    """The user's reward function raised, or returned something that is not a score."""


class WeightsError(AsyncflowError, RuntimeError):
    """Weights could not be published, verified or applied."""


class CheckpointError(AsyncflowError, RuntimeError):
    """A checkpoint is missing, foreign or incomplete."""


class ReplicaFailed(AsyncflowError, RuntimeError):
    """A replica of a stage ended with an error; `report` is its traceback or the signal that killed it."""

    def __init__(self, replica: str, report: str) -> None:
        super().__init__(replica, report)
        self.replica, self.report = replica, report

    def __str__(self) -> str:
        return f"replica {self.replica} failed:\n{self.report.rstrip()}"


class StalenessExceeded(AsyncflowError, RuntimeError):
    """A row older than the bound reached the trainer."""


class StorageError(AsyncflowError):
    """Base of the errors of the TransferQueue."""


class SchemaError(StorageError, ValueError):
    """A column, dtype or length does not fit the table."""


class RowGone(StorageError, LookupError):
    """A row was retired, dropped, or never existed."""


class ColumnMissing(StorageError, LookupError):
    """A column is not written for a row that was asked for it."""


class CellConflict(StorageError, ValueError):
    """A different value was put for a cell that is already written."""


class LeaseLost(StorageError, RuntimeError):
    """The lease under which rows were held has expired, was given back, or belongs to another holder."""


class CapacityExceeded(StorageError, RuntimeError):
    """One put alone is larger than the table may ever be."""


class QueueClosed(StorageError, RuntimeError):
    """The queue, table or stream was closed."""


class UnitLost(QueueClosed):
    """The storage unit that a request was sent to has gone, the queue has not: the same request may be sent again."""


class QueueFailed(StorageError, RuntimeError):
    """A producer failed, and every waiting consumer learns of it with this error."""


class AccessDenied(StorageError, PermissionError):
    """Keys are missing, or the other end of a connection does not know them."""


class WireError(StorageError, ValueError):
    """A message was malformed, oversized or of an unknown kind."""


class WaitTimeout(StorageError, TimeoutError):
    """A bounded wait ended; the message names who waited, for what, and what was missing."""
