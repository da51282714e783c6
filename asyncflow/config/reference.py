"""The page that lists every key of a pipeline file, made from the model so that it cannot fall behind."""

from typing import Any

from asyncflow.config.schema import schema

_TITLE = """# Every key of a pipeline file

Made by `asyncflow schema --markdown`. Unknown keys are refused with the nearest name; any key can be set on the command
line as `section.key=value`. Durations are written `5s`, `500ms`, `2m`.
"""


def reference() -> str:
    """Return the page as Markdown."""
    document = schema()
    sections = [_section(name, field, document["$defs"]) for name, field in document["properties"].items()]
    plain = [lines[0] for lines in sections if lines[0].startswith("|")]
    tables = ["\n".join(lines) for lines in sections if not lines[0].startswith("|")]
    top = "\n".join(["## At the top", "", "| key | values | default | |", "|---|---|---|---|", *plain])
    return "\n\n".join([_TITLE.strip(), *tables, top]) + "\n"


def _section(name: str, field: dict[str, Any], known: dict[str, Any]) -> list[str]:
    target = _target(field, known)
    if target is None:
        return [_row(name, field)]
    title = f"{name}[]" if field.get("type") == "array" else name
    rows = [_row(key, own) for key, own in target["properties"].items()]
    purpose = field.get("description") or target["description"]
    return [f"## {title}", "", purpose, "", "| key | values | default | |", "|---|---|---|---|", *rows]


def _target(field: dict[str, Any], known: dict[str, Any]) -> dict[str, Any] | None:
    for own in (field, field.get("items", {}), *field.get("anyOf", ())):
        if "$ref" in own:
            found: dict[str, Any] = known[own["$ref"].rpartition("/")[2]]
            return found
    return None


def _row(key: str, field: dict[str, Any]) -> str:
    default = "" if field.get("default") is None else f"`{_shown(field['default'])}`"
    description = " ".join(field.get("description", "").split()).replace("|", "\\|")
    return f"| `{key}` | {_values(field)} | {default} | {description} |"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kinds = [own.get("type") for own in field.get("anyOf", [field])]
    names = {"array": "list", "object": "mapping", "string": "text"}
    return " or ".join(names.get(kind, kind) for kind in kinds if kind not in (None, "null"))
