"""A mistake that shows only when fields are seen together, and what more than one part of the checks looks for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncflow.config import importing
from asyncflow.config.document import Route


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, and where it is."""

    route: Route
    message: str
    uses: tuple[Route, ...] = ()
    """Other fields that the message rests on: it says nothing while one of them is wrong itself."""
    at: Literal["key", "value"] = "value"


def model_folder(route: Route, path: str, near: str | None = None) -> Iterator[Problem]:
    """Check that a path is the folder of a model."""
    folder = Path(path)
    if not path or folder.is_dir():
        return
    if near:
        yield Problem(route, f"no folder {path!r} - did you mean {near!r}?")
    elif folder.exists():
        yield Problem(route, f"{path} is a file: expected a folder in Hugging Face format")
    else:
        yield Problem(route, f"{importing.missing(folder)} (models are folders here, nothing is downloaded)")
