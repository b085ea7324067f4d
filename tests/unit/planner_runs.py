"""Questions, and a finished row of MAVL with the oracle's plans, whose answers a test decides."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from cli_runs import done, write_documents, write_rows

from mmqa_jax.papers.mavl import ROLES, planner_prompt

Plan = tuple[int, ...]
PLANS: list[Plan] = [
    plan for count in range(4) for plan in itertools.combinations((1, 2, 3), count)
]
THINGS = ("cat", "dog", "bus", "cup", "tree", "boat", "lamp", "shoe")


def prepare_questions(folder: Path) -> Path:
    """A corpus whose train questions are asked of the planner."""
    rows = [
        {
            "id": f"q{n}", "split": "train", "question": f"What is the {thing} for?",
            "answers": [thing], "caption": f"A {thing} on a table.",
        }
        for n, thing in enumerate(THINGS)
    ]  # fmt: skip
    # Of which the tokenizer's pieces are made, so that prompts are short.
    words = [planner_prompt(role, "Context: Question: Answer:") for role in ROLES]
    words.append(", ".join(f"Action_{n}" for n in (1, 2, 3)) + " No action")
    rows += [{"id": f"w{n}", "split": "train", "question": x} for n, x in enumerate(words * 3)]
    write_documents(folder / "documents", rows)
    done("prepare", "corpus", f"--raw={folder / 'documents'}", f"--out={folder / 'data'}")
    return folder / "data"


def write_finished(
    folder: Path, score: Callable[[int, Plan], float | None], lost: Plan = (), missing: int = 0
) -> Path:
    """The trace of the row.

    Args:
      score: (number of a question, actions) -> of its answer.
      lost: actions whose tools gave nothing.
      missing: so many plans of the last question were not executed.
    """
    folder.mkdir(parents=True)
    used = [plan for plan in PLANS if not set(plan) & set(lost)]
    rows = [
        {
            "question_id": f"q{n}",
            "tools": {str(action): "" if action in lost else "known" for action in (1, 2, 3)},
            "by_actions": [
                {"actions": list(plan), "answer": "x", "score": score(n, plan)} for plan in used
            ],
        }
        for n in range(len(THINGS))
    ]
    if missing:
        del rows[-1]["by_actions"][-missing:]
    write_rows(folder / "trace.jsonl", json.loads(json.dumps(rows)))
    return folder
