"""Candidates for reading reStructuredText, and sources of Python's documentation."""

from __future__ import annotations

from collections.abc import Callable

from tests.bench.parsers.html import debian_files


def SAMPLES() -> dict[str, bytes]:
    """The sources of ten pages."""
    pages = debian_files("python3.11-doc", "usr/share/doc/python3.11/html/_sources/**/*.txt", 10)
    return {name.removesuffix(".txt"): page for name, page in pages.items()}


def _docutils(data: bytes) -> str:
    import docutils.core

    settings = {"report_level": 5, "file_insertion_enabled": False, "raw_enabled": False}
    return docutils.core.publish_doctree(data, settings_overrides=settings).astext()


CANDIDATES: dict[str, Callable[[bytes], str]] = {"docutils": _docutils}
