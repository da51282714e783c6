"""A store without a controller, and its leases in few words."""

import secrets

from asyncflow.storage import Batch, Schema
from asyncflow.storage.sampler import Wish
from asyncflow.storage.spec import Choice, TaskSpec
from asyncflow.storage.store import Limits, Store

COLUMNS = {"x": "int64", "ids": "list<int64>", "versions": "list<int32>", "weight": "float32"}


def store_of(sampler, columns=COLUMNS, durable=False, reads=(), **choice):
    """Return a store with one task, "it"."""
    store = Store("t", Schema(columns), Limits())
    store.declare("it", TaskSpec(reads, sampler, durable=durable, choice=Choice(**choice)))
    return store


def admit(store, repeat=1, **columns):
    intake = store.intake(Batch.of(store.schema, columns), repeat, secrets.token_bytes(8))
    return store.admit(intake)


def lease(store, holder=1, now=0.0, task="it", **wish):
    return store.ledger.lease(task, Wish(**wish), now, holder)


def rows_of(grant):
    return None if grant is None else grant.rows.tolist()
