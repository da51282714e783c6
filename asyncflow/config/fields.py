"""Kinds of values in a pipeline file, and the base of its sections."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema


def _whole(value: object) -> object:
    """Take 1e3 for the whole number that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Strict: neither the text "3" nor true is a number, and neither 1 nor the text "yes" is true.
Flag = Annotated[bool, Strict()]
Int = Annotated[int, BeforeValidator(_whole), Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
PositiveInt = Annotated[Int, Field(ge=1)]
Count = Annotated[Int, Field(ge=0)]
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Unit = Annotated[Float, Field(gt=0, le=1)]
Aggregate = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
# As in `asyncflow.types`, which brings numpy.
OnStale = Literal["mask", "drop", "requeue", "wait"]
OnOutcome = Literal["drop", "zero", "retry", "error"]
Share = Annotated[Float, Field(ge=0, lt=1)]


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("expected a duration such as 5s, 500ms or 2m")
    text = str(value).strip()
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    for unit in ("ms", "s", "m", "h"):
        if text.endswith(unit):
            text, scale = text.removesuffix(unit), units[unit]
            break
    else:
        scale = 1.0
    try:
        seconds = float(text) * scale
    except ValueError:
        raise ValueError("expected a duration such as 5s, 500ms or 2m") from None
    if not 0 < seconds < 1e7:
        raise ValueError("expected a duration above zero and below 115 days")
    return seconds


Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9.]+([eE][-+]?[0-9]+)?\s*(ms|s|m|h)?\s*$"},
            ]
        }
    ),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
