"""Scorers beside the official code of the same scores, on random inputs; see __main__.py."""
