"""The two small protocols that an engine must speak to take part in a run.

Everything else is the engine's own business. An adapter never sees the queue, the stages or the executor:
it receives token ids and weights, and gives back token ids, log-probabilities and gradients.
Tokens go in and out as ids, never as text, so that what is trained is what was sampled.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from asyncflow.storage.batch import Batch
from asyncflow.types import Float32s, Int32s, Int64s, RowIds, Version

if TYPE_CHECKING:
    import torch

    from asyncflow.algorithms.report import Report

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; `temperature=0` is greedy, `top_p=1` and `top_k=-1` switch the truncations off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    """Budget of the whole response in tokens, also when it is interrupted and continued."""
    stop_tokens: tuple[int, ...] = ()
    """A response ends with the first of these; the stop token is part of the response."""


@dataclass(frozen=True, slots=True)
class Request:
    """One response to be generated."""

    key: int
    """Names the request; comes back on its completion."""
    prompt: Int64s
    """Token ids, shape (prompt length,)."""
    sampling: Sampling
    seed: int
    """The response depends on the weights, the prompt and this seed, never on the other requests of a batch."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished response; the three arrays have one entry for each response token."""

    key: int
    tokens: Int64s
    logprobs: Float32s
    """Log-probabilities of the sampled tokens under the distribution they were drawn from, before top-p and
    top-k, at the sampling temperature (greedy: at temperature 1)."""
    versions: Int32s
    """Version of the weights that produced each token, stamped by the engine."""
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model an engine holds: a folder in Hugging Face format, or a config from which a new one is made."""

    path: str | None
    config: Mapping[str, object] | None
    """Keys of a Hugging Face config, with `model_type`; used when `path` is None."""
    dtype: Literal["float32", "bfloat16", "float64"]
    seed: int
    """Initialises the weights of a new model: the same seed gives the same weights in every engine."""
    pad_token: int
    """Token id that fills padding; never attended to."""
    eos_token: int | None
    """Written into the config of a new model."""
    head: Literal["tokens", "value"] = "tokens"
    """What the model says at each position: the next token, or one number. A value head that the folder does not have
    starts at zero."""


@dataclass(frozen=True, slots=True)
class OptimSpec:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); the learning rate is given at each step."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much of an engine is in use, in requests."""

    running: int
    """Begun and not ended."""
    waiting: int
    """Submitted and not begun."""
    limit: int
    """Most that run at a time."""
    begins: bool = True
    """Whether what waits begins as soon as it fits; False while the engine drains, is paused or asleep, or takes
    nothing until all that runs has ended."""


class InferEngine(Protocol):
    """Generates responses. All calls are thread-safe; `results` may run in one thread while others submit."""

    @property
    def version(self) -> Version | None:
        """Version of the weights in use; None before the first `apply_weights`."""

    @property
    def capacity(self) -> Capacity:
        """How many requests run and wait now."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; refuse a prompt that leaves no room for one token (DataError that names its key)."""

    def results(self, keys: Sequence[int]) -> Iterator[list[Completion]]:
        """Yield completions of `keys` as they finish, in non-empty lists, until each of them was yielded."""

    def abort(self, keys: Sequence[int]) -> None:
        """End requests early: they complete with what they have and finish reason `abort`."""

    def pause(self) -> None:
        """Stop after the current token; requests keep their tokens."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def stage_weights(self, version: Version, tensors: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        """Take new weights beside those in use, in place of others that were staged and not applied.

        Refuses unknown, missing or misshapen tensors (WeightsError); then everything is as it was before.
        """

    def apply_weights(self, version: Version, *, drain: bool = False, recompute: bool = False) -> Version:
        """Switch between two tokens to what is staged: this version, or a newer one; return the one then in use.

        With `drain` nothing begins from now on, and the call waits until what runs has ended. With `recompute` what
        runs gets keys and values of the new weights before its next token; by default it keeps those it has. A
        version that is neither staged nor in use is refused (WeightsError), and generation goes on without it.
        """

    def sleep(self) -> None:
        """Give device memory back between phases (colocated mode)."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def close(self) -> None:
        """Free everything; idempotent. Pending `results` end with QueueClosed."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows that one forward and backward pass sees. B rows, L tokens, R response positions."""

    tokens: "torch.Tensor"
    """int64 (B, L): prompts padded on the left, responses on the right, so that responses start in one column."""
    attention: "torch.Tensor"
    """int64 (B, L): 1 where there is a token."""
    mask: "torch.Tensor"
    """float32 (B, R): 1 for a response token that is trained; R is the longest response."""
    columns: Mapping[str, "torch.Tensor"]
    """What the loss reads beside the log-probabilities: (B, R) for token columns, (B,) for row columns.
    Padding holds zeros; the mask decides, not the value."""
    rows: Int64s
    """Row ids, shape (B,)."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What the current model says of the response tokens of a micro-batch; (B, R), at the temperature."""

    logprobs: "torch.Tensor"
    """Zeros where the model has a value head."""
    entropy: "torch.Tensor | None"
    """Full-vocabulary entropy, with gradient only if it was asked for; None where an engine does not compute it."""
    values: "torch.Tensor | None" = None
    """What a value head says before each token; None of any other model."""


LossOutput = tuple["torch.Tensor", "Report"]
"""A scalar loss whose sum over the micro-batches of a step is the loss of the step, and what it reports: sums, and
maxima under names that end in `_max` (`asyncflow.algorithms.report`)."""

Loss = Callable[[Scored, MicroBatch], LossOutput]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did."""

    version: Version
    """Version after the step."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of how many data-parallel processes a training engine is, and how they find each other."""

    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    """Path of a file that is not there yet, for torch.distributed's file store; not needed by one alone."""
    timeout: float = 600.0
    """Longest wait in seconds for another rank."""


ALONE = Ranks()


class InferFactory(Protocol):
    """Makes an inference engine; registered by name or under the entry point group `asyncflow.infer`."""

    def __call__(self, model: ModelSpec, *, max_inflight: int, options: Mapping[str, object]) -> InferEngine: ...


class TrainFactory(Protocol):
    """Makes a training engine; registered by name or under the entry point group `asyncflow.train`.

    An engine without value heads refuses such a model (ConfigError).
    """

    def __call__(
        self,
        model: ModelSpec,
        *,
        optim: OptimSpec,
        temperature: float,
        options: Mapping[str, object],
        ranks: Ranks = ALONE,
    ) -> "TrainEngine":
        """`temperature` is that of sampling: every log-probability is taken at it.

        With several ranks the first engine of a process waits until all of them are there; another one joins them in
        its first call that all ranks make, since it may be made at any time.
        """


class TrainEngine(Protocol):
    """Holds the model and its optimizer, and turns losses into versions.

    Where there are several data-parallel ranks, every one of them calls `micro_batches` (but for those `alone`),
    `optim_step`, `exchange` and `export_weights`, in the same order.
    """

    @property
    def version(self) -> Version:
        """Number of optimizer steps behind the weights."""

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) of this process among those that see different rows."""

    def exchange(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, in the order of the ranks."""

    def micro_batches(
        self,
        batch: Batch,
        token_budget: int,
        columns: Sequence[str],
        rows: RowIds | None = None,
        *,
        alone: bool = False,
    ) -> Iterator[MicroBatch]:
        """Cut rows into micro-batches of at most `token_budget` tokens; padding counts, unless the engine packs rows.

        Reads `prompt_tokens`, `response_tokens`, `response_mask` and `columns`; `rows` holds the row ids, by
        default 0, 1, …. The budget is hard: a row that alone exceeds it is an error that names it (DataError).
        Every rank yields the same number, empty ones where its rows do not suffice; with `alone` this one cuts for
        itself, to score rows and not to train on them.
        """

    def forward_backward(self, micro_batch: MicroBatch, loss: Loss, *, entropy: bool = False) -> "Report":
        """Add the gradient of `loss` and return what it reports; with `entropy` the entropy carries gradient."""

    def optim_step(self, lr: float, scale: float = 1.0) -> StepReport:
        """Add the ranks' gradients up, scale, clip, step at this learning rate, clear; the version grows by one.

        `scale` is what the losses were not divided by yet: the denominator of a step is known when all of its rows
        are. A gradient that is not finite is an error (FloatingPointError), and nothing is changed by it.
        """

    def logprobs(self, micro_batch: MicroBatch) -> "torch.Tensor":
        """Log-probabilities of the response tokens at the sampling temperature, (B, R), without gradient."""

    def values(self, micro_batch: MicroBatch) -> "torch.Tensor":
        """What a value head says before each response token, (B, R), without gradient."""

    def export_weights(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield every tensor under its Hugging Face name, tied ones included, detached and on the CPU.

        Ranks other than 0 may yield nothing.
        """

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the model to host memory; what is returned writes the copy in Hugging Face format, from any thread."""

    def state(self) -> dict[str, object]:
        """Copy optimizer, schedule, version and random state: what `load_state` needs beside the weights."""

    def load_state(self, state: dict[str, object]) -> None:
        """Go on exactly where `state` was taken."""

    def sleep(self) -> None:
        """Give device memory back between phases (colocated mode)."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def close(self) -> None:
        """Free everything; idempotent."""
