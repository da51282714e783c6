"""Scores for responses: the user's function or a built-in one, run in processes that can be killed."""
