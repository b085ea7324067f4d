"""A damaged file of a checkpoint or of weights is refused by name, or changes nothing."""

import re
import shutil

import pytest
import tiny_run
from flip_targets import TARGETS
from flips import REFUSED, SAME, Damage, damaged, each_file, made
from test_training_resume import assert_same_run

from mmqa_jax.core.checkpoints.checksums import SUMS, find_damage
from mmqa_jax.core.errors import UserError
from mmqa_jax.training.loop import Resuming
from mmqa_jax.weights.record import read_metadata

BY_NAME = {target.name: target for target in TARGETS}
# What no result depends on: an older checkpoint but for its score and its checksums, and Orbax's own
# notes on a checkpoint.
UNREAD = re.compile(
    r"10/(?!metrics/metrics|SHA256SUMS)|20/(_CHECKPOINT_METADATA|commit_success\.txt)$"
)
# Of the older checkpoint's checksums all but that of its score, of a run's config.json all but the
# config itself.
HARMLESS = re.compile(r"10/SHA256SUMS$|(best/)?config\.json$")


def two_of(damages, number):
    """A flipped bit, whose place in the file goes round from file to file, and a zeroed block."""
    *flips, block = damages
    return [flips[number % len(flips)], block]


@pytest.fixture(scope="module")
def folders():
    with made(
        [BY_NAME[name] for name in ("training step", "trained run", "converted weights")]
    ) as f:
        yield f


@pytest.mark.parametrize("name", ["training step", "trained run", "converted weights"])
def test_damage_of_every_file(folders, name):
    target = BY_NAME[name]
    folder, wanted = folders[target]
    files = target.damaged_files(folder)
    assert any(file.name == SUMS for file in files)
    assert len(files) > 12
    flips = {file: next(each_file((folder / file).stat().st_size)) for file in files}
    unread = {file: flip for file, flip in flips.items() if UNREAD.match(str(file))}
    assert bool(unread) == (name == "training step")
    if unread:  # all at once: each opening takes longer than refusing one
        assert damaged(target, folder, unread, wanted).kind == SAME
    for number, file in enumerate(files):
        if file in unread:
            continue
        each = list(each_file((folder / file).stat().st_size))
        damages = two_of(each, number)
        harmless = HARMLESS.match(str(file))
        if harmless:
            damages = damages[:1]
        elif file.suffix != ".json" and file.name != SUMS:  # a checksum notices either
            damages = [each[number % len(each)]]
        for damage in damages:
            outcome = damaged(target, folder, {file: damage}, wanted)
            kinds = (REFUSED, SAME) if harmless else (REFUSED,)
            assert outcome.kind in kinds, f"{file}, {damage}: {outcome}"


@pytest.mark.parametrize(
    "name", [*("parts that are merged", "parts of a stopped job", "grids", "embeddings", "indexes")]
)
def test_damage_of_every_file_of_a_job(name):
    """Refused, or computed again."""
    target = BY_NAME[name]
    with made([target]) as folders:
        folder, wanted = folders[target]
        for number, file in enumerate(target.damaged_files(folder)):
            for damage in two_of(each_file((folder / file).stat().st_size), number):
                outcome = damaged(target, folder, {file: damage}, wanted)
                assert outcome.kind in (REFUSED, SAME), f"{file}, {damage}: {outcome}"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Copies a run that was stopped at step 24, with checkpoints 20 and 24 and its best of 15."""
    made = tmp_path_factory.mktemp("stopped") / "run"
    batches = tiny_run.Watched(tiny_run.pipeline(), 24, tiny_run.raise_signal(15))
    with pytest.raises(SystemExit):
        tiny_run.run(made, batches, validation=tiny_run.KEEP_BEST)
    return lambda workdir: shutil.copytree(made, workdir)


def resume(workdir, batches=None, **options):
    """Goes on with a run that keeps its best step."""
    batches = batches or tiny_run.pipeline()
    return tiny_run.run(workdir, batches, validation=tiny_run.KEEP_BEST, **options)


def largest(folder):
    return max(folder.rglob("ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)


def test_a_damaged_step_is_refused_and_the_one_before_it_offered(
    stopped, uninterrupted, tmp_path, capfd, monkeypatch
):
    """The one before it is from before the checksums, as is all else."""
    monkeypatch.delenv("MMQA_PROGRESS", raising=False)
    run = stopped(tmp_path / "run")
    for sums in run.rglob(SUMS):
        if sums.parent.name != "24":
            sums.unlink()
    file = largest(run / "checkpoints" / "24" / "params")
    Damage(file.stat().st_size // 2, 3).apply(file)
    name = file.relative_to(run / "checkpoints" / "24")
    with pytest.raises(
        UserError,
        match=rf"checkpoints/24: {name} is damaged \(.*\); checkpoint 20 is whole: add "
        r"--skip_damaged to set this one aside \(as 24\.damaged\) and go on from 20\.$",
    ):
        resume(run)
    assert (run / "checkpoints" / "24").is_dir()
    capfd.readouterr()
    resume(run, resuming=Resuming(skip_damaged=True))
    assert "set aside as 24.damaged, going on from step 20" in capfd.readouterr().err
    assert (run / "checkpoints" / "24.damaged").is_dir()
    assert_same_run(run, uninterrupted)


def test_without_an_earlier_whole_step_nothing_is_set_aside(stopped, tmp_path):
    run = stopped(tmp_path / "run")
    for step in (15, 20, 24):
        (run / "checkpoints" / str(step) / "iterator" / "metadata").write_text("{}")
    for flag in (False, True):
        with pytest.raises(UserError, match=r"24: iterator/metadata is damaged .*no earlier"):
            resume(run, resuming=Resuming(skip_damaged=flag))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["15", "20", "24"]


def test_a_damaged_folder_best_is_written_again(stopped, tmp_path):
    """On resuming, from the best step's checkpoint."""
    run = stopped(tmp_path / "run")
    best = run / "best"
    before = find_damage(best / "weights"), read_metadata(best)
    for file in (best / "model.json", largest(best)):
        Damage(file.stat().st_size // 2, 1).apply(file)
    with pytest.raises(SystemExit):
        resume(run, tiny_run.Watched(tiny_run.pipeline(), 1, tiny_run.raise_signal(15)))
    assert (find_damage(best / "weights"), read_metadata(best)) == before


def test_the_best_step_outlives_its_damaged_checkpoint(uninterrupted, tmp_path):
    """In the folder best, until a better one comes."""
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "60")  # as if it had been killed after step 50
    (run / "model.json").unlink()
    before = read_metadata(run / "best")
    assert before["step"] == 30
    (run / "checkpoints" / "30" / "metrics" / "metrics").write_text("{}")
    resume(run, resuming=Resuming(skip_damaged=True))
    assert (run / "checkpoints" / "30.damaged").is_dir()
    assert read_metadata(run / "best") == before
