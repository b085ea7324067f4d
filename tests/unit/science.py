"""A tiny ScienceQA in its official files: sums, whose neighbours in the library answer alike."""

import json
from pathlib import Path

from cli_runs import done

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


def problem(number: int, split: str) -> dict:
    word = WORDS[number % len(WORDS)]
    return {
        "question": f"Which word is number {word}?",
        "choices": [word, WORDS[(number + 3) % len(WORDS)]][:: 1 if number % 2 else -1],
        "answer": 0 if number % 2 else 1,
        "hint": "", "image": None, "task": "closed choice", "grade": "grade2",
        "subject": "natural science", "topic": "math", "category": "words", "skill": "words",
        "lecture": "", "solution": f"The number {word} is a word.", "split": split,
    }  # fmt: skip


def prepare_science(folder: Path, *, rationales: bool = True) -> Path:
    """`mmqa prepare scienceqa` of 16 train, 4 val and 4 test questions."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    splits = {"train": range(16), "val": range(16, 20), "test": range(20, 24)}
    problems = {str(n): problem(n, split) for split, own in splits.items() for n in own}
    if not rationales:
        problems = {name: {**one, "solution": ""} for name, one in problems.items()}
    (raw / "problems.json").write_text(json.dumps(problems))
    listed = {split: [str(n) for n in own] for split, own in splits.items()}
    (raw / "pid_splits.json").write_text(json.dumps(listed))
    done("prepare", "scienceqa", f"--raw={raw}", f"--out={folder / 'data'}")
    return folder / "data"
