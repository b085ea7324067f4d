"""SEED-Bench: its file and pictures, both scores, prediction formats."""

import json

import pytest
from cli_runs import done, mmqa, png, write_rows

from mmqa_jax.benchmarks.seedbench import read_seedbench, score_seed_bench
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Prediction

pytestmark = pytest.mark.usefixtures("quiet")

NAMES = {"Scene Understanding": 1, "Instances Counting": 5, "Action Recognition": 10}


def question(name: str | int, dimension: int, answer: str | None, data_id: str, **fields) -> dict:
    return {
        "question_id": name, "question": "How many?", "choice_a": "One", "choice_b": "Two",
        "choice_c": "Three", "choice_d": "Four", "answer": answer, "question_type_id": dimension,
        "data_type": "video" if dimension > 9 else "image", "data_id": data_id, **fields,
    }  # fmt: skip


QUESTIONS = [
    question("101", 5, "A", "1454426_2591111986"),
    question("102", 5, "B", "77_88.jpg"),
    question(103, 1, "C", "absent"),
    question("v9", 10, "D", "94328.webm", segment=[648.0, 658.0]),
]


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    (folder / "SEED-Bench-image").mkdir(parents=True)
    (folder / "SEED-Bench-image" / "1454426_2591111986").write_bytes(png((1, 0, 0)))
    (folder / "SEED-Bench-image" / "77_88.jpg").write_bytes(png((2, 0, 0)))
    (folder / "SEED-Bench-video-image").mkdir()
    (folder / "SEED-Bench-video-image" / "10_v9.png").write_bytes(png((9, 0, 0)))
    (folder / "SEED-Bench.json").write_text(
        json.dumps({"questions": QUESTIONS, "question_type": NAMES})
    )
    return folder


def test_prepare_official_files(raw, tmp_path):
    ended = mmqa("prepare", "seedbench", f"--raw={raw}", f"--out={tmp_path / 'out'}", "--json")
    assert ended.code == 0, ended.err
    assert "1 of 4 questions have no picture file" in ended.err
    found = ended.value["found"]
    assert (found["questions on a picture"], found["questions on a video"]) == (3, 1)
    assert (found["pictures found"], found["5 Instances Counting"]) == (3, 2)
    corpus = open_corpus(tmp_path / "out")
    questions = {q.id: q for q in corpus.questions("test")}
    first, video = questions["101"], questions["v9"]
    assert (first.choices, first.answers) == (("One", "Two", "Three", "Four"), ("One",))
    assert first.category == "Instances Counting"
    assert corpus.question_picture(first) == png((1, 0, 0))
    assert corpus.question_picture(questions["102"]) == png((2, 0, 0))
    assert corpus.question_picture(video) == png((9, 0, 0))
    assert (video.extra["data_type"], video.extra["segment"]) == ("video", [648.0, 658.0])
    assert questions["103"].image is None


def test_captions_by_question_or_picture(raw):
    captions = {"77_88.jpg": "two cups", "103": "its own", "absent": "of the picture"}
    captions |= {"94328.webm": "of the whole video"}
    (raw / "captions.json").write_text(json.dumps(captions))
    found = read_seedbench(raw)
    assert {q.id: q.extra["caption"] for q in found.questions if "caption" in q.extra} == {
        "102": "two cups",
        "103": "its own",
    }
    assert found.counts["questions with caption"] == 2


def test_scores_by_dimension_pictures_and_videos(raw):
    questions = read_seedbench(raw).questions
    said = {"101": "A", "102": "B.", "103": "C", "v9": "A"}  # `B.` is not the letter alone
    evaluation = score_seed_bench(questions, [Prediction(k, v) for k, v in said.items()])
    (scores,) = evaluation.scored
    assert scores.scores == {"seed_bench/letter": 0.5}
    by_group = {name: v["seed_bench/letter"] for name, v in scores.by_category.items()}
    assert list(by_group.items()) == [
        ("1 Scene Understanding", 1.0),
        ("5 Instances Counting", 0.5),
        ("10 Action Recognition", 0.0),
        ("pictures, 1-9", pytest.approx(2 / 3)),
        ("videos, 10-12", 0.0),
    ]
    assert evaluation.unparsed == {"seed_bench/letter": 1}
    # Choices are those of least loss.
    chosen = [Prediction("101", choice=0), Prediction("102", "B", choice=0)]
    (scores,) = score_seed_bench(questions, chosen).scored
    assert scores.scores == {"seed_bench/likelihood": 1 / 4, "seed_bench/letter": 1 / 4}
    assert scores.missing == 2


def test_prediction_formats(raw, tmp_path):
    letters = {"101": "A", "102": "C", "103": "C", "v9": "D"}
    flags = ("evaluate", "seedbench", f"--references={raw}")
    formats = {
        "leaderboard": [{"question_id": k, "prediction": v} for k, v in letters.items()],
        "llava": [
            {"question_id": int(k) if k.isdecimal() else k, "text": v, "prompt": ""}
            for k, v in letters.items()
        ],
        "eval": [
            {"q_id": k, "prediction": v, "gt": "A", "q_type_id": 5} for k, v in letters.items()
        ],
        "losses": [
            {"question_id": k, "losses": [0.1 if letter == v else 2 for letter in "ABCD"]}
            for k, v in letters.items()
        ],
        "ours": [{"question_id": k, "choice": "ABCD".index(v)} for k, v in letters.items()],
    }
    for name, rows in formats.items():
        # eval.py calls its JSON lines results.json
        path = write_rows(tmp_path / f"{name}.{'json' if name == 'eval' else 'jsonl'}", rows)
        result = done(*flags, f"--predictions={path}")
        scorer = "letter" if name in ("leaderboard", "llava") else "likelihood"
        assert result["scores"] == {f"seed_bench/{scorer}": 0.75}, name
        assert result["by_category"]["pictures, 1-9"] == {
            f"seed_bench/{scorer}": pytest.approx(2 / 3)
        }
        out = tmp_path / f"{name}-submission.jsonl"
        done(*flags, f"--predictions={path}", f"--submission={out}")
        written = [json.loads(line) for line in out.read_text().splitlines()]
        assert written == formats["leaderboard"]


def test_published_results(raw, tmp_path):
    """evaluate_result/SEED-Bench-1/GPT-4V.json: every line but the last ends in a comma."""
    letters = {"101": "A", "102": "C", "103": "C", "v9": "D"}
    lines = [
        json.dumps({"question_id": k, "prediction": v, "gt_answer": "A"})
        for k, v in letters.items()
    ]
    flags = ("evaluate", "seedbench", f"--references={raw}")
    path = tmp_path / "GPT-4V.json"
    for text in (",\n".join(lines), "[\n" + ",\n".join(lines) + "\n]\n"):
        path.write_text(text)
        result = done(*flags, f"--predictions={path}")
        assert result["scores"] == {"seed_bench/letter": 0.75}
        assert result["notes"] == [
            "seed_bench/letter: the predictions are texts; one counts if it is the correct letter, "
            "whether a model wrote it or eval.py chose it by likelihood"
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choice_c": None}, r"entry 2: choice_c is None; text was expected"),
        ({"answer": "E"}, r"entry 2: answer is 'E'; a letter from A to D"),
        ({"question_id": "101"}, r"entry 2: question_id '101' is there twice"),
        ({"question_id": None}, r"entry 2: question_id is None"),
        ({"question_type_id": 6}, r"question_type_id is 6 and data_type 'image'"),
        ({"question_type_id": [1]}, r"question_type_id is \[1\] and data_type 'image'"),
        ({"question_type_id": True}, r"question_type_id is True and data_type 'image'"),
        ({"data_type": "Single Image"}, r"SEED-Bench-2 is another benchmark"),
    ],
)
def test_broken_questions(change, message, raw, tmp_path, refused):
    rows = [QUESTIONS[0], {**QUESTIONS[1], **change}, *QUESTIONS[2:]]
    data = {"questions": rows, "question_type": NAMES}
    (raw / "SEED-Bench.json").write_text(json.dumps(data))
    refused("prepare", "seedbench", f"--raw={raw}", f"--out={tmp_path / 'out'}", message=message)


def test_broken_files(raw, tmp_path, refused):
    flags = ("evaluate", "seedbench", f"--references={raw}")
    path = tmp_path / "bad.jsonl"
    for line, message in (
        ({"question_id": "101", "losses": [1, 2]}, r"losses is \[1, 2\]; a number for each choice"),
        ({"question_id": "101", "losses": [1, 2, 3, "x"]}, r"a number for each choice"),
        ({"question_id": "999", "prediction": "A"}, r"no question has the id '999'"),
        ({"question_id": "101", "prediction": 1}, r"prediction is 1; text was expected"),
    ):
        path.write_text(json.dumps(line) + "\n")
        refused(*flags, f"--predictions={path}", message=message)
    path.write_text("")
    refused(*flags, f"--predictions={path}", message=r"holds no predictions")
    numbered = json.dumps({"questions": QUESTIONS, "question_type": {"Scene Understanding": [1]}})
    for text in ("[]", numbered):
        (raw / "SEED-Bench.json").write_text(text)
        refused(*flags, f"--predictions={path}", message=r'\{"questions": \[\.\.\.\]')
    (raw / "SEED-Bench.json").unlink()
    refused(*flags, f"--predictions={path}", message=r"SEED-Bench\.json: no such file; fetch")
