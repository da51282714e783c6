"""The schemes of a data source: `jsonl:FILE`, `parquet:FILE`, `reasoning_gym:TASK`, `python`."""

FILE_SCHEMES = ("jsonl", "parquet")
GENERATED_SCHEMES = ("reasoning_gym",)
SCHEMES = (*FILE_SCHEMES, *GENERATED_SCHEMES, "python")


def scheme(source: str) -> tuple[str, str]:
    """Split a source into its scheme and the file or task behind it."""
    kind, _, rest = source.partition(":")
    return kind.strip(), rest.strip()
