"""Adapters of training engines."""
