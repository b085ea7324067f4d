"""The texts that Fusion-in-Decoder encodes: a question with one passage each.

Formats: facebookresearch/FiD src/data.py (`Dataset`, `Collator`), guilk/KAT src/data.py
(`OkvqaDataset`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mmqa_jax.data.schema import Source


def source_passage(source: Source, text: str = "") -> str:
    """A source as FiD's passage; `text` in place of its own."""
    return f"title: {source.title} context: {text or source.text}"


def entity_passage(name: str, description: str) -> str:
    """An entity of Wikidata as KAT's passage of explicit knowledge."""
    return f"title: {name} context: {name} is a {description}"


def answer_passage(candidate: str, evidence: str) -> str:
    """A language model's answer with its evidence as KAT's passage of implicit knowledge."""
    return f"candidate: {candidate} evidence: {evidence}"


def question_texts(question: str, passages: Sequence[str]) -> list[str]:
    """Returns the texts to encode: the question with each passage, or alone where there is none."""
    asked = f"question: {question}"
    return [f"{asked} {passage}" for passage in passages] or [asked]
