"""The typed configuration: files and overrides in, one checked `Pipeline` or every mistake at once out.

    model      the sections and their fields
    load       files and overrides → Loaded(pipeline), or ConfigError with every mistake and its line
    check      what goes together
    schema     a pipeline as YAML, the JSON Schema for editors
    importing  functions of the user's own by import path

Nothing here imports torch, transformers, pyarrow or the user's code, so that `validate` answers at once; and this file
imports nothing at all, so that a reward worker that only resolves an import path starts without pydantic.
"""
