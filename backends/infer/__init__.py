"""Adapters of inference engines."""
