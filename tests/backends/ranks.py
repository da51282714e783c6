"""Processes that are the data-parallel ranks of a training engine; each does what a function of this module says."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from asyncflow.algorithms.aggregate import UNDIVIDED, denominators
from asyncflow.algorithms.loss import ValueLoss, policy_loss
from asyncflow.algorithms.options import reads, resolve
from asyncflow.backends.base import ALONE, Ranks
from asyncflow.backends.train.torch import TorchEngine
from asyncflow.execute.spawn import fork, pipe
from tests.backends.tiny import OPTIM, SPEC

EXACT = replace(SPEC, dtype="float64")
OPTIONS = resolve("grpo", {})
COLUMNS = reads(OPTIONS)


def engine(ranks=ALONE, **options):
    torch.set_num_threads(1)
    return TorchEngine(EXACT, optim=OPTIM, temperature=1.0, options=options, ranks=ranks)


def train(own, shares, aggregate, budget=40):
    """Make a step of each of these rows; return how many micro-batches there were, and what came out."""
    loss = policy_loss({**OPTIONS, "aggregate": aggregate}, UNDIVIDED, max_response_tokens=8)
    counts, norms = [], []
    for rows, whole in shares:
        parts = list(own.micro_batches(rows, budget, COLUMNS))
        for part in parts:
            own.forward_backward(part, loss)
        counts.append(len(parts))
        norms.append(
            own.optim_step(0.01, denominators(whole["response_mask"].to_padded()[0]).share(aggregate)).grad_norm
        )
    weights = {name: tensor.numpy() for name, tensor in own.export_weights()}
    return {"counts": counts, "norms": norms, "weights": weights, "version": own.version}


def train_both(own, place, shares, lone, budget=40):
    """Make steps of the policy and of a critic beside it, which this rank alone has asked for values before."""
    critic = TorchEngine(replace(EXACT, head="value"), optim=OPTIM, temperature=1.0, options={}, ranks=place)
    valued = [critic.values(part) for part in critic.micro_batches(lone, budget, (), alone=True)]
    losses = ValueLoss(UNDIVIDED, None), policy_loss(OPTIONS, UNDIVIDED, 8)
    norms = []
    for rows, whole in shares:
        for each, loss, columns in zip((critic, own), losses, (("values", "returns"), COLUMNS), strict=True):
            for part in each.micro_batches(rows, budget, columns):
                each.forward_backward(part, loss)
        share = denominators(whole["response_mask"].to_padded()[0]).share("token-mean")
        norms.append((critic.optim_step(0.01, share).grad_norm, own.optim_step(0.01, share).grad_norm))
    # From the state dict: every rank has weights, and only rank 0 exports them.
    weights = {name: tensor.numpy() for name, tensor in critic._model.state_dict().items()}
    critic.close()
    return {"valued": len(valued), "norms": norms, "weights": weights}


def swap(own, data):
    return own.exchange(data)


def wait(own, connection):
    """Say that this rank is there; rank 0 then waits for the others, which never come."""
    connection.send("there")
    return own.exchange(b"") if own.data_parallel[0] == 0 else connection.recv()


def serve(task, ranks, args, connection, options):
    try:
        own = engine(ranks, **options)
        more = {wait: [connection], train_both: [ranks]}.get(task, [])
        connection.send(task(own, *more, *args))
        own.close()
    except Exception:  # noqa: BLE001  the border of the process
        connection.send(traceback.format_exc())


@contextmanager
def started(
    folder, task: Callable[..., object], args: list[tuple[object, ...]], timeout=60.0, **options
) -> Iterator[list]:
    """Start a rank for each arguments; yields (process, connection) of each."""
    running = []
    for rank, own in enumerate(args):
        ours, theirs = pipe()
        place = Ranks(rank, len(args), str(folder / "ranks"), timeout)
        running.append((fork(serve, (task, place, own, theirs, options), f"rank-{rank}", 120.0), ours))
        theirs.close()
    yield running
    for process, connection in running:
        process.kill()
        process.join()
        connection.close()


def answers(running):
    found = []
    for _, connection in running:
        assert connection.poll(120.0), "the rank does not answer"
        found.append(connection.recv())
    for each in found:
        assert not (isinstance(each, str) and "Traceback" in each), each
    return found
