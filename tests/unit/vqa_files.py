"""Small official files of OK-VQA and A-OKVQA."""

import json
from pathlib import Path
from typing import Any

from cli_runs import done, png, write_documents

from mmqa_jax.prompting.examples.side_files import write_answer_aware

# question_id -> (image_id, question, the ten answers, question_type)
OKVQA: dict[str, dict[int, tuple[int, str, list[str], str]]] = {
    "train": {15: (1, "What grows here?", ["ivy"] * 6 + ["vine"] * 4, "eight")},
    "val": {
        25: (2, "What sport is this?", ["race"] * 4 + ["ride"] * 2 + ["bike"] * 4, "one"),
        26: (2, "How many wheels?", ["two"] * 10, "one"),
        35: (3, "What is cooking?", ["the soup"] * 2 + ["soup"] * 2 + ["stew"] * 6, "five"),
    },
}


def write_okvqa(folder: Path, *, pictures: bool = False) -> Path:
    """Questions, annotations, captions and tags as published; perhaps pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in OKVQA.items():
        asked = [
            {"image_id": image_id, "question": text, "question_id": question_id}
            for question_id, (image_id, text, _, _) in rows.items()
        ]
        answered = [
            {
                "image_id": image_id, "question_id": question_id, "question_type": kind,
                "answer_type": "other", "confidence": 3,
                "answers": [
                    {"answer_id": n, "raw_answer": f"{a}s", "answer_confidence": "yes", "answer": a}
                    for n, a in enumerate(answers, start=1)
                ],
            }
            for question_id, (image_id, _, answers, kind) in rows.items()
        ]  # fmt: skip
        write(folder / f"OpenEnded_mscoco_{split}2014_questions.json", {"questions": asked})
        write(folder / f"mscoco_{split}2014_annotations.json", {"annotations": answered})
    lines = ['2\t[{"caption": "a wheel", "conf": 0.2}, {"caption": "a bike", "conf": 0.9}]', ""]
    (folder / "vinvl_captions_val2014.tsv").write_text("\n".join(lines))
    (folder / "tags_val.tsv").write_text('2\t[{"class": "bike", "conf": 0.99}]\n')
    (folder / "tags_test.tsv").write_text('3\t[{"class": "pot", "conf": 0.5}]\n')
    if pictures:
        for name in ("val2014/COCO_val2014_000000000002.jpg", "COCO_train2014_000000000001.jpg"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(png((1, 2, 3)))
    return folder


def prepare_team(folder: Path) -> Path:
    """OK-VQA in `data`, passages in `knowledge`, the VQA model's answer-aware examples."""
    write_okvqa(folder / "raw")
    done("prepare", "okvqa", f"--raw={folder / 'raw'}", f"--out={folder / 'data'}")
    write_documents(folder / "documents", [])
    done("prepare", "corpus", f"--raw={folder / 'documents'}", f"--out={folder / 'knowledge'}")
    names = [str(name) for name in OKVQA["val"]]
    write_answer_aware(folder / "examples.json", dict.fromkeys(names, names))
    return folder


def soft_labels() -> list[dict[str, Any]]:
    """The val questions as the third party's soft labels."""
    rows = []
    for question_id, (image_id, text, answers, _) in OKVQA["val"].items():
        label = {a: round(min(answers.count(a) / 3, 1), 3) for a in answers}
        rows.append(
            {
                "sent": text,
                "question_id": question_id,
                "label": label,
                "class": 1,
                "img_id": f"COCO_val2014_{image_id:012d}",
            }
        )
    return rows


def aokvqa_row(name: str, split: str = "val", **changes: Any) -> dict[str, Any]:
    """One question of A-OKVQA's JSON."""
    row = {
        "split": split, "image_id": 2, "question_id": name, "question": f"What is {name}?",
        "choices": ["sun", "moon", "star", "sky"], "correct_choice_idx": 1,
        "direct_answers": ["moon"] * 2 + ["the moon"] * 8, "difficult_direct_answer": False,
        "rationales": ["It shines.", "It is round.", "It is night."],
    }  # fmt: skip
    if split == "test":
        for key in ("correct_choice_idx", "direct_answers", "rationales"):
            del row[key]
    return {**row, **changes}


def write_aokvqa(folder: Path) -> Path:
    """A val split of three questions, one of them difficult, and a test split of one."""
    folder.mkdir(parents=True, exist_ok=True)
    val = [aokvqa_row("q1"), aokvqa_row("q2", difficult_direct_answer=True)]
    val.append(aokvqa_row("q3", image_id=3, choices=["sun", "sun", "star", "sky"]))
    write(folder / "aokvqa_v1p0_val.json", val)
    write(folder / "aokvqa_v1p0_test.json", [aokvqa_row("t1", "test")])
    return folder


def write(path: Path, value: Any) -> Path:
    """Writes JSON, an entry a line."""
    path.write_text(json.dumps(value, indent=1))
    return path
