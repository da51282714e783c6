"""The curves of a run as a picture: reward, loss, lengths, mismatch of the two engines, staleness and speed."""

from pathlib import Path

from asyncflow.errors import MissingDependency
from asyncflow.observe.metrics import Metrics, Record

_PANELS = (
    ("reward", ("reward_mean",)),
    ("loss", ("loss",)),
    ("response tokens", ("response_tokens_mean", "response_tokens_max")),
    ("|log-probability gap| of trainer and rollout", ("logprob_gap_mean",)),
    ("staleness in versions", ("staleness_mean", "staleness_max")),
    ("tokens per second", ("tokens_per_s",)),
)


def draw(metrics: Metrics, path: Path) -> None:
    """Write the curves as PNG; MissingDependency without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise MissingDependency("matplotlib", "curves.png", "pip install 'asyncflow-rl[plot]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 2, figsize=(11, 10), layout="constrained")
    steps = metrics.of("step")
    for axis, (title, keys) in zip(axes.flat, _PANELS, strict=True):
        for key in keys:
            values = [(step["step"], {**step["time"], **step}.get(key)) for step in steps]
            points = [(step, value) for step, value in values if value is not None]
            axis.plot(*zip(*points, strict=True), label=key, linewidth=1.4) if points else None
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if len(keys) > 1 and axis.lines:  # supervised steps have no lengths and no age
            axis.legend(frameon=False)
    _accuracy(axes.flat[0], metrics.of("eval"), steps)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _accuracy(axis: object, records: list[Record], steps: list[Record]) -> None:
    last = steps[-1]["step"] if steps else 0
    moments = {"before": 0, "after_warmup": 0, "after": last}
    points = [(record.get("step", moments.get(record["moment"], 0)), record["accuracy"]) for record in records]
    points = [(step, accuracy) for step, accuracy in points if accuracy is not None]
    if points:
        axis.plot(*zip(*sorted(points), strict=True), "o--", label="held-out accuracy")  # type: ignore[attr-defined]
        axis.legend(frameon=False)  # type: ignore[attr-defined]
