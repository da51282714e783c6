"""A pipeline as text: the resolved YAML that a run keeps, and the JSON Schema that editors complete and check with."""

import re
from typing import Any

import yaml

from asyncflow.algorithms.options import unused
from asyncflow.config.document import Yaml12Loader
from asyncflow.config.model import Pipeline


def dump(pipeline: Pipeline) -> str:
    """Write every field as YAML that `load` reads back as an equal pipeline.

    Options of `train` that have no effect stand as comments, since giving them would be refused.
    """
    lines = []
    for name, value in pipeline.model_dump().items():
        idle = _idle(value) if name == "train" else {}
        kept = {key: child for key, child in value.items() if key not in idle} if idle else value
        lines.append(_yaml({name: kept}))
        lines += [f"  # {_yaml({key: value[key]}).strip()}  ({why})\n" for key, why in idle.items()]
    return "".join(lines)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of pipeline.yaml, with the documentation of each field."""
    document = Pipeline.model_json_schema()
    document["properties"]["output"] = {
        "anyOf": [{"$ref": "#/$defs/Output"}, {"type": "string"}],
        "description": Pipeline.model_fields["output"].description,
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": "asyncflow pipeline"}


def _idle(train: dict[str, Any]) -> dict[str, str]:
    reasons = (line.partition(" ") for line in unused(train["algorithm"], train))
    return {name: why for name, _, why in reasons}


def _yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever YAML 1.1 or 1.2 would not read as text, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    breaks = any(letter in value for letter in "\x85\u2028\u2029\r")  # line breaks that only double quotes preserve
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if breaks else None)


_Dumper.add_representer(str, _text)

# SafeDumper knows the resolvers of YAML 1.1; with those of 1.2 beside them a text that either would misread is quoted.
for _first, _resolvers in Yaml12Loader.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        _Dumper.add_implicit_resolver(_tag, re.compile(_pattern.pattern), [_first])
