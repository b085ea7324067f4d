"""Every reader of users' files, on damaged files: a result that can be written, or one sentence.

Damage is drawn by a seed: cut and empty files, flipped and missing bytes, other bytes in between,
and well-formed JSON and tables whose values are of other types.
"""

import base64
import dataclasses
import json
import random
import tarfile

import numpy as np
import pytest
from cli_runs import png
from science import problem
from test_aokvqa_reader import hub_rows, write_parquet
from test_mmbench import ROWS, write_tsv
from test_published_vectors import SAMPLES, questions, write_vectors
from test_regions import ID, detections, write_vinvl, write_x101
from test_seed_bench import NAMES, QUESTIONS
from test_webqa_reader import COLORS, hidden_test, train_val, write_images
from vqa_files import soft_labels, write, write_aokvqa, write_okvqa

from mmqa_jax.benchmarks.aokvqa import read_aokvqa, read_aokvqa_predictions
from mmqa_jax.benchmarks.mmbench import read_mmbench, read_mmbench_predictions
from mmqa_jax.benchmarks.okvqa import read_okvqa, read_okvqa_predictions
from mmqa_jax.benchmarks.scienceqa import read_scienceqa, read_scienceqa_predictions
from mmqa_jax.benchmarks.seedbench import read_seedbench
from mmqa_jax.benchmarks.vqav2 import read_vqav2
from mmqa_jax.core.array_pickle import load_arrays
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.answers import read_vocabulary
from mmqa_jax.data.formats import webqa
from mmqa_jax.data.formats.interchange import read_interchange
from mmqa_jax.data.formats.tables import write_spreadsheet
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.published_tokenizers import QuestionWords, read_glove, read_words
from mmqa_jax.data.records.grid_records import NpzFiles
from mmqa_jax.data.records.record_shards import FeatureError
from mmqa_jax.data.regions import RegionError, VinVLFeatures, VinVLRows, X101Features, read_sizes
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation import webqa as webqa_scores
from mmqa_jax.evaluation.compare import compare_runs, compare_tables, read_run
from mmqa_jax.evaluation.multiple_choice import read_choice_lines
from mmqa_jax.evaluation.report import read_curves
from mmqa_jax.evaluation.scores import read_answers
from mmqa_jax.prompting.examples.library import PublishedVectors
from mmqa_jax.prompting.examples.side_files import load_answer_aware, load_candidates
from mmqa_jax.prompting.run import read_prompts
from mmqa_jax.retrieval.rankings import read_rankings

pytestmark = pytest.mark.slow

TRIALS = 150
# What a reader may raise; of the last three the caller counts the picture as broken.
NAMED = (UserError, PictureError, RegionError, FeatureError)
OTHERS = (
    None,
    True,
    -1,
    0,
    7,
    2.5,
    float("nan"),
    1e400,
    10**30,
    10**400,
    "",
    "x",
    "7",
    "7.0",
    "\ud83d",
    "9" * 5000,
    [],
    {},
    [[]],
    [{}],
    {"a": None},
    ["a", 1],
    [1.5],
    "٣",
    "\x00",
)
GLOVE_WORDS = QuestionWords(["PAD", "UNK", "CLS", "a", "b"])
ASKED = [
    Question(name, "val", "?", answers=("a",), choices=("a", "b", "nan"), answer_index=0)
    for name in ("25", "26", "q1", "q2", "7", "1000007")
]


def json_damage(value, rng: random.Random):
    """The value with one of its parts replaced, taken out or repeated."""
    parent, places = None, []
    inner = value
    while isinstance(inner, dict | list) and inner and (parent is None or rng.random() < 0.75):
        keys = [*inner] if isinstance(inner, dict) else range(len(inner))
        parent, key = inner, rng.choice(keys)
        places.append(key)
        inner = inner[key]
    if parent is None or rng.random() < 0.05:
        return rng.choice(OTHERS)
    if rng.random() < 0.15:
        parent.pop(key)
    elif isinstance(parent, list) and rng.random() < 0.2:
        parent.append(inner)
    elif isinstance(parent, dict) and rng.random() < 0.1:
        parent["7.0"] = parent.pop(key)
    else:
        parent[key] = rng.choice(OTHERS)
    return value


def typed_damage(data: bytes, rng: random.Random) -> bytes:
    """Well-formed text with a value of another kind: of a JSON file, or of one of its lines."""
    text = data.decode()
    try:
        return json.dumps(json_damage(json.loads(text), rng)).encode()
    except ValueError:
        lines = text.split("\n")
    row = rng.randrange(len(lines))
    cells = lines[row].split("\t")
    column = rng.randrange(len(cells))
    try:
        cells[column] = json.dumps(json_damage(json.loads(cells[column]), rng))
    except ValueError:
        cells[column] = str(rng.choice(OTHERS)).encode("utf-8", "replace").decode()
    lines[row] = "\t".join(cells)
    return "\n".join(lines).encode()


def damaged(data: bytes, rng: random.Random) -> bytes:
    kind = rng.choice(("cut", "flip", "out", "in", "typed", "typed", "typed", "typed", "whole"))
    at = rng.randrange(len(data) + 1)
    if kind == "cut":
        return data[:at]
    if kind == "flip" and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "out":
        return data[:at] + data[at + rng.randrange(1, 40) :]
    if kind == "in":
        pieces = (b"\0", b"\xff\xfe", b"[", b'{"', b"\n", b"\t", b"9" * 5000, b"[" * 2000, b'"')
        return data[:at] + rng.choice(pieces) + data[at:]
    if kind == "whole":
        pieces = (b"", b"\n", b"null", b"[]", b"{}", b"\xef\xbb\xbf", b"[" * 100_000, b"PK\x03\x04")
        return rng.choice((*pieces, rng.randbytes(300), data.decode("latin1").encode("utf-16")))
    try:
        return typed_damage(data, rng)
    except UnicodeDecodeError:
        return data[:at] + rng.randbytes(8) + data[at + 8 :]


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def put(path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def okvqa(folder):
    write(folder / "captions_okvqa.json", {"2": "a bike", "3": "a pot"})
    captions = [{"image_id": 2, "caption": "a bike stands"}]
    write(folder / "captions_val2014.json", {"annotations": captions})
    write_okvqa(folder)


def okvqa_labels(folder):
    write(folder / "val_soft_labels.json", soft_labels())


def aokvqa_hub(folder):
    write_parquet(folder / "validation-0.parquet", hub_rows())


def science(folder):
    problems = {str(n): problem(n, "test") for n in range(3)}
    write(folder / "problems.json", problems)
    write(folder / "pid_splits.json", {"test": [*problems]})
    write(folder / "captions.json", {"captions": {"0": "a picture"}})
    turns = [{"value": "Who?\nA. I\nB. You"}, {"value": "B"}]
    write(folder / "test_questions_all.json", [{"id": "9", "conversations": turns}])


def vqav2(folder):
    asked = [{"image_id": 1, "question": "What?", "question_id": 10}]
    known = {"image_id": 1, "question_id": 10, "answer_type": "other", "answers": [{"answer": "a"}]}
    write(folder / "v2_OpenEnded_mscoco_train2014_questions.json", {"questions": asked})
    write(folder / "v2_mscoco_train2014_annotations.json", {"annotations": [known]})
    qas = [{"qa_id": 1, "question": "What?", "answer": "A."}]
    write(folder / "question_answers.json", [{"id": 5, "qas": qas}])
    write(folder / "image_data.json", [{"image_id": 5, "coco_id": 1}])


def mmbench(folder):
    write_tsv(folder / "t.tsv", ROWS)
    write(folder / "captions.json", {"7": "a red square"})


def mmbench_sheet(folder):
    folder.mkdir(exist_ok=True)
    columns = [*ROWS[0]]
    write_spreadsheet(folder / "t.xlsx", columns, [[row[c] for c in columns] for row in ROWS])


def seed_bench(folder):
    write(folder / "SEED-Bench.json", {"questions": QUESTIONS, "question_type": NAMES})
    write(folder / "captions.json", {"77_88.jpg": "two cups"})


def release(folder):
    write(folder / "WebQA_train_val.json", train_val())
    write(folder / "WebQA_test.json", hidden_test())


def images(folder):
    write_images(folder, {n: base64.b64encode(png(color)) for n, color in COLORS.items()})


def read_images(folder):
    tsv = webqa.ImagesTsv(folder / "imgs.tsv")
    tsv.check_ends(["images/30000000", "images/30000002"])
    return [len(tsv.read(row)) for row in range(3)]


def documents(folder):
    picture = {"id": "p", "modality": "image", "image": "p.png", "text": "a square"}
    text = {"id": "s", "modality": "text", "text": "A star is red.", "title": "Stars", "own": [1]}
    asked = {
        "id": "q", "split": "val", "question": "Red?", "answers": ["yes"], "positives": ["s"],
        "negatives": ["p"], "choices": ["yes", "no"], "answer_index": 0, "keywords": "yes",
    }  # fmt: skip
    put(folder / "sources.jsonl", lines(picture, text))
    put(folder / "questions.jsonl", lines(asked))
    put(folder / "p.png", "?")
    with tarfile.open(folder / "images.tar", "w") as tar:
        tar.add(folder / "p.png", "p.png")
    (folder / "p.png").unlink()


def read_documents(folder):
    found = read_interchange(folder)
    names = [source.image for source in found.sources if source.image]
    return [*found.sources, *found.questions, [len(found.read_picture(name)) for name in names]]


def of_file(name: str, value, read, *more):
    """Writes one file, of JSON or as this text; reads it."""

    def make(folder):
        put(folder / name, value if isinstance(value, str) else json.dumps(value))

    return make, lambda folder: read(folder / name, *more)


def tables(folder):
    rows = [(7, "A"), (1000007, "nan")]
    write_spreadsheet(folder / "p.xlsx", ("index", "prediction"), rows)
    put(folder / "p.tsv", "index\tprediction\n" + "".join(f"{n}\t{a}\n" for n, a in rows))


def read_tables(folder):
    return [read_mmbench_predictions(folder / name, ASKED) for name in ("p.xlsx", "p.tsv")]


def vectors(folder):
    write_vectors(folder, {split: rows[:9] for split, rows in SAMPLES.items()})


def read_vectors(folder):
    found = PublishedVectors(folder)
    return [found.of(questions("val")[:2], kind).shape for kind in ("question", "image")]


def features(folder):
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / "COCO_train2014_000000000007.npz", x=np.ones((2, 2, 3), "f4"))


def vinvl(folder):
    folder.mkdir(exist_ok=True)
    write_vinvl(folder / "t.tsv", {10_000_000: detections(1, 1595)})
    put(folder / "hw.tsv", '10000000\t[{"height": 4, "width": 5}]\n')


def read_vinvl(folder):
    rows = VinVLRows(folder / "t.tsv")
    names = [rows[n].name for n in range(len(rows))]
    picture = VinVLFeatures({1: folder / "t.tsv"}).read(10**7)
    return [names, read_sizes(folder / "hw.tsv"), len(picture)]


def runs(folder):
    for name, score in (("a", 1.0), ("b", 0.0)):
        about = {"dataset": "corpus", "split": "test", "limit": None, "scores": {"s": score}}
        (folder / name).mkdir()
        write(folder / name / "scores.json", about | {"llm": {"requests": 2.0}})
        rows = ({"question_id": str(n), "scores": {"s": score}} for n in range(3))
        put(folder / name / "per_question.jsonl", lines(*rows))
    put(folder / "metrics.jsonl", lines({"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}))


def read_runs(folder):
    compared = compare_runs([read_run(folder / name) for name in "ab"])
    return [len(compare_tables(compared)), read_curves(folder / "metrics.jsonl")]


OUTPUT_TSV = (
    "Guid\tQcate\tQ\tA\tKeywords_A\tOutput_conf\tOutput\n"
    'g1\ttext\tWho?\t["I"]\tI\t[-0.5]\t["He"]\ng2\tcolor\tWhat?\t["red"]\tred\t"[-1]"\t["a"]\n'
)
SOURCES = {"predicted sources": [1, "g1_0"], "predicted answers": ["a"]}
END_TO_END = {"g1": {**SOURCES, "answer confidence": [-1.0]}}
ANSWER = {"question_id": "7", "answer": "a", "choice": 1, "sources": ["s"], "beams": [["a", -1.0]]}
LLAVA = ({"question_id": "7", "text": "A", "round_id": 1}, {"question_id": 7, "text": "B"})
DECODING = {"max_new_tokens": 5, "stop": ["\n"], "temperature": 0.5, "seed": 3}
SAID = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
PROMPTS = (
    {"id": "a", "prompt": "Who?", **DECODING},
    {"prompt": "Which?", "choices": ["a", "b"], "meta": {"n": 1}},
    {"messages": SAID, "top_k": 4, "n": 1},
)
READERS = {
    "okvqa": (okvqa, read_okvqa),
    "okvqa_labels": (okvqa_labels, read_okvqa),
    "aokvqa": (write_aokvqa, read_aokvqa),
    "aokvqa_hub": (aokvqa_hub, read_aokvqa),
    "scienceqa": (science, read_scienceqa),
    "vqav2": (vqav2, read_vqav2),
    "mmbench": (mmbench, read_mmbench),
    "mmbench_sheet": (mmbench_sheet, read_mmbench),
    "seed_bench": (seed_bench, read_seedbench),
    "webqa": (
        release,
        lambda f: webqa.read_release([f / "WebQA_train_val.json"], [f / "WebQA_test.json"]),
    ),
    "webqa_pictures": (images, read_images),
    "documents": (documents, read_documents),
    "predictions": of_file("p.jsonl", lines(ANSWER, ANSWER | {"question_id": 8}), read_answers),
    "okvqa_predictions": of_file(
        "p.json",
        [{"question_id": 25, "answer": "a"}, {"question_id": 26.0, "answer": None}],
        read_okvqa_predictions,
        ASKED,
    ),
    "aokvqa_predictions": of_file(
        "p.json",
        {"q1": {"direct_answer": "a", "multiple_choice": "b"}, "q2": {}},
        read_aokvqa_predictions,
        ASKED,
    ),
    "scienceqa_predictions": of_file(
        "p.json",
        {"results": {"7": 1, "25": "0"}, "outputs": {"7": "A", "26": None}},
        read_scienceqa_predictions,
        ASKED,
    ),
    "mmbench_tables": (tables, read_tables),
    "mmbench_json": of_file(
        "p.json",
        [{"index": 7, "prediction": "A"}, {"index": 1000007.0, "prediction": "B"}],
        read_mmbench_predictions,
        ASKED,
    ),
    "llava_lines": of_file("p.jsonl", lines(*LLAVA), read_mmbench_predictions, ASKED),
    "seed_bench_losses": of_file(
        "p.jsonl",
        lines({"question_id": "7", "losses": [1, 2, 0.5]}),
        read_choice_lines,
        ASKED,
    ),
    "webqa_tsv": of_file("p.tsv", OUTPUT_TSV, webqa_scores.read_output_tsv),
    "webqa_json": of_file("p.json", END_TO_END, webqa_scores.read_prediction_json),
    "rankings": of_file(
        "r.jsonl",
        lines({"question_id": "7", "sources": ["s", "t"], "scores": [2, 1.5]}),
        read_rankings,
    ),
    "prompts": of_file("p.jsonl", lines(*PROMPTS), read_prompts),
    "candidates": of_file("c.json", {"7": [{"answer": "a", "confidence": 0.5}]}, load_candidates),
    "answer_aware": of_file("a.json", {"7": ["25", 26]}, load_answer_aware),
    "vocabulary": of_file("v.json", ["a", "b"], lambda file: read_vocabulary(file).answers),
    "openvqa_vocabulary": of_file(
        "v.json",
        [{"a": 0, "b": 1}, {"0": "a", "1": "b"}],
        lambda file: read_vocabulary(file).answers,
    ),
    "words": of_file("w.json", ["PAD", "UNK", "CLS", "a"], lambda file: read_words(file).words),
    "glove": of_file(
        "g.txt", "a 1 2\nb 0.5 nan\n", lambda file: read_glove(file, GLOVE_WORDS).tolist()
    ),
    "vectors": (vectors, read_vectors),
    "features": (features, lambda f: NpzFiles(f).read(7)[0].shape),
    "vinvl": (vinvl, read_vinvl),
    "runs": (runs, read_runs),
    "x101": (write_x101, lambda f: len(X101Features(f).read(ID))),
    "pickle": (write_x101, lambda f: sorted(map(str, load_arrays(next(f.rglob("*.pkl")))))),
}


def plain(value):
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return repr(value)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_named(name, tmp_path):
    make, read = READERS[name]
    folder = tmp_path / "input"
    folder.mkdir()
    make(folder)
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    assert read(folder)
    rng = random.Random(name)
    named = 0
    for trial in range(TRIALS):
        path = rng.choice([*files])
        data = damaged(files[path], rng)
        path.write_bytes(data)
        try:
            found = read(folder)
        except NAMED as error:
            named += bool(str(error).strip().encode())
        except BaseException as error:
            error.add_note(f"{name}, trial {trial}: {path.name} was {data[:300]!r}")
            raise
        else:
            questions_of = getattr(found, "questions", found)
            if isinstance(questions_of, list):
                json.dumps(questions_of, default=plain, ensure_ascii=False).encode()
        path.write_bytes(files[path])
    assert named > TRIALS / 10
