"""launch/: what every launcher would do, one dry run each, and what those for one machine do.

Commands are compared with golden files, which MMQA_UPDATE_GOLDEN=1 writes anew after a change of a
launcher: read the diff. Manifests are read: they follow their schemas, hold what was filled in, and
run the command that was given.
"""

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml
from launch_schemas import SCHEMAS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
GOLDEN = Path(__file__).parent / "golden" / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch")])
TRAIN = (
    *("mmqa", "train", "--config=configs/atlas/rerank.py", "--config.data.dir=/runs/atlas"),
    "--workdir=/runs/a run",
)
EMBED = ("mmqa", "embed", "--data=/runs/atlas", "--model=/runs/contrastive", "--out=/runs/index")
IMAGE = "IMAGE=registry/mmqa:tpu"
_TPU = ("--name=mmqa", "--zone=us-west4-a", "--project=lab", "--dry_run")
DRY_RUNS = {
    "slurm": ("slurm.sbatch", "--dry_run", *TRAIN),
    "slurm_elastic": ("slurm.sbatch", "--dry_run", "--elastic=4,2,1", *TRAIN),
    "slurm_array": ("slurm_array.sbatch", "--dry_run", *EMBED),
    "babysit": ("babysit.sh", "--dry_run", "--max_restarts=5", *TRAIN),
    "two_processes": ("two_processes.sh", "--dry_run", *TRAIN),
    "preflight": ("preflight.sh", "--dry_run", "--workdir=/runs/a run", "--devices=256"),
    "device_check": ("device_check.sh", "--dry_run"),
    "image": ("image.sh", "--dry_run", "--tag=registry/mmqa:tpu", "--accelerator=tpu", "--push"),
    "tpu_vm_create": ("tpu_vm.sh", "create", *_TPU, "--type=v5litepod-256", "--spot"),
    "tpu_vm_wait": ("tpu_vm.sh", "wait", *_TPU),
    "tpu_vm_setup": ("tpu_vm.sh", "setup", *_TPU),
    "tpu_vm_preflight": ("tpu_vm.sh", "preflight", *_TPU, *TRAIN),
    "tpu_vm_run": ("tpu_vm.sh", "run", *_TPU, *TRAIN),
    "tpu_vm_logs": ("tpu_vm.sh", "logs", *_TPU),
    "tpu_vm_stop": ("tpu_vm.sh", "stop", *_TPU),
    "tpu_vm_delete": ("tpu_vm.sh", "delete", *_TPU),
    "xpk": (
        *("xpk.sh", "--cluster=pod", "--zone=us-west4-a", "--project=lab", "--name=rerank"),
        *("--image=registry/mmqa:tpu", "--dry_run", *TRAIN),
    ),
    "jobset-tpu": (
        *("submit.sh", "gke/jobset-tpu.yaml", IMAGE, "TOPOLOGY=16x16", "HOSTS=64"),
        *("--dry_run", "--", *TRAIN),
    ),
    "jobset-gpu": ("submit.sh", "gke/jobset-gpu.yaml", IMAGE, "--dry_run", "--", *TRAIN),
    "indexed-job-inference": (
        *("submit.sh", "gke/indexed-job-inference.yaml", IMAGE, "SHARDS=64", "--dry_run"),
        *("--", *EMBED),
    ),
    "ray_cluster": (
        *("submit.sh", "ray_cluster.yaml", IMAGE, "--dry_run", "--", *EMBED, "--engine=ray"),
    ),
    "skypilot": (
        *("submit.sh", "skypilot.yaml", "BUCKET=gs://runs", "HOSTS=2", "--dry_run"),
        *("--", *TRAIN),
    ),
}
# What was filled in, by its place in the manifest.
SPEC = ("spec", "replicatedJobs", 0, "template", "spec")
POD = ("template", "spec")
MANIFESTS = {
    "jobset-tpu": {
        (*SPEC, "completions"): 64,
        (*SPEC, "parallelism"): 64,
        (*SPEC, *POD, "nodeSelector", "cloud.google.com/gke-tpu-topology"): "16x16",
        (*SPEC, *POD, "containers", 0, "image"): "registry/mmqa:tpu",
        (*SPEC, *POD, "containers", 0, "resources", "limits", "google.com/tpu"): 4,
    },
    "jobset-gpu": {
        (*SPEC, "completions"): 2,
        (*SPEC, *POD, "containers", 0, "image"): "registry/mmqa:tpu",
        (*SPEC, *POD, "containers", 0, "resources", "limits", "nvidia.com/gpu"): 8,
        (*SPEC, *POD, "containers", 0, "env", 0): {
            "name": "JAX_COORDINATOR_ADDRESS",
            "value": "mmqa-host-0-0.mmqa:8476",
        },
        (*SPEC, *POD, "containers", 0, "env", 1): {"name": "JAX_NUM_PROCESSES", "value": "2"},
        # Of which that address is made.
        ("metadata", "name"): "mmqa",
        ("spec", "network", "subdomain"): "mmqa",
        ("spec", "replicatedJobs", 0, "name"): "host",
    },
    "indexed-job-inference": {
        ("spec", "completions"): 64,
        ("spec", *POD, "containers", 0, "image"): "registry/mmqa:tpu",
        ("spec", *POD, "containers", 0, "env", 0): {"name": "JOB_COMPLETIONS", "value": "64"},
    },
    "ray_cluster": {("spec", "entrypoint"): " ".join((*EMBED, "--engine=ray"))},
    "skypilot": {("num_nodes",): 2, ("file_mounts", "/runs", "source"): "gs://runs"},
}


def launch(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a launcher to its end, with this interpreter's `python` and `mmqa`."""
    return subprocess.run(
        ["bash", str(LAUNCH / name), *arguments],
        cwd=ROOT,
        env=env(**environment),
        capture_output=True,
        text=True,
        timeout=300,
    )


def env(**more: str) -> dict[str, str]:
    path = os.pathsep.join(
        [more.pop("PATH", ""), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"} | more


@functools.cache
def dry_run(name: str) -> str:
    """What a launcher prints that it would do."""
    ended = launch(*DRY_RUNS[name])
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout.replace(str(ROOT), "ROOT")


@pytest.mark.parametrize("name", sorted(DRY_RUNS.keys() - MANIFESTS.keys()))
def test_commands(name):
    printed = dry_run(name)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("MMQA_UPDATE_GOLDEN"):
        golden.write_text(printed)
    assert printed == golden.read_text()


def test_every_launcher_is_tried():
    tried = {arguments[0] for arguments in DRY_RUNS.values()}
    tried |= {Path(a[1]).name for a in DRY_RUNS.values() if a[0] == "submit.sh"}
    ours = {
        "common.sh",
        "setup.sh",
        "demo.sh",
        "test.sh",
        "docs.sh",
    }  # sourced, or there to run on one machine
    files = {path.name for path in [*SCRIPTS, *LAUNCH.rglob("*.yaml")]}
    assert files - ours == tried
    assert {path.stem for path in GOLDEN.iterdir()} == DRY_RUNS.keys() - MANIFESTS.keys()


def test_shell_is_sound():
    """By shellcheck."""
    check = [Path(sys.executable).with_name("shellcheck"), "-x", "-P", LAUNCH, *SCRIPTS]
    ended = subprocess.run([*map(str, check)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_follow_their_schemas(name):
    manifest = yaml.safe_load(dry_run(name))
    for place, filled_in in MANIFESTS[name].items():
        assert functools.reduce(lambda at, key: at[key], place, manifest) == filled_in, place
    schema = SCHEMAS[manifest.get("kind", "SkyPilot")]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(manifest, schema)
    manifest["specs"] = {}
    with pytest.raises(jsonschema.ValidationError, match="'specs' was unexpected"):
        jsonschema.validate(manifest, schema)


@pytest.mark.parametrize("name", ["jobset-tpu", "jobset-gpu", "indexed-job-inference"])
def test_manifests_run_the_command_as_it_was_given(name, tmp_path):
    """The shell of the pod finds the words again, spaces and all."""
    manifest = yaml.safe_load(dry_run(name))
    job = manifest["spec"]
    if manifest["kind"] == "JobSet":
        job = job["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in job["template"]["spec"]["volumes"]
    }
    for program in ("mmqa", "bash"):
        fake = tmp_path / program
        fake.write_text('#!/bin/sh\nprintf "%s\\n" "$(basename "$0")" "$@"\n')
        fake.chmod(0o755)
    ended = subprocess.run(
        [shutil.which("bash"), *container["args"][1:]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "7"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    words = [*EMBED, "--shard=auto"] if manifest["kind"] == "Job" else list(TRAIN)
    assert lines[-len(words) :] == words


def test_skypilot_runs_the_command_as_one_of_its_processes():
    *exports, last = yaml.safe_load(dry_run("skypilot"))["run"].splitlines()
    assert shlex.split(last)[-len(TRAIN) :] == list(TRAIN)
    set_here = {line.split()[1].partition("=")[0] for line in exports}
    assert set_here >= {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}


def test_the_dockerfile_copies_what_is_there():
    lines = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and line[0] != "#"]
    known = {"FROM", "ARG", "COPY", "RUN", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions} == known
    for name, rest in instructions:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
    arguments = {rest.partition("=")[0] for name, rest in instructions if name == "ARG"}
    given = re.findall(r"--build-arg (\w+)=", (GOLDEN / "image.txt").read_text())
    assert arguments == set(given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("babysit.sh",), "no command"),
        (("babysit.sh", "--backoff=soon", "true"), "'soon' is not a whole number"),
        (("babysit.sh", "--limit=3", "true"), "unknown flag '--limit=3'"),
        (("babysit.sh", "--members=true", "--counts=2,one", "true"), "'one' is not a whole number"),
        (("two_processes.sh", "--processes=0", "true"), "give a positive number"),
        (("image.sh", "--tag=a", "--accelerator=rocm"), "give cpu, cuda12 or tpu"),
        (("tpu_vm.sh", "create"), "--name and --zone are needed"),
        (("tpu_vm.sh", "fly", "--name=a", "--zone=b"), "'fly': give create"),
        (("xpk.sh", "--cluster=a", "true"), "are needed"),
        (("submit.sh", "gke/nothing.yaml"), "no such file"),
        (("submit.sh", "gke/jobset-tpu.yaml", "--", "mmqa"), "also needs IMAGE"),
        (("submit.sh", "gke/jobset-tpu.yaml", "COLOR=red", "--", "mmqa"), "no such name"),
        (("submit.sh", "gke/jobset-tpu.yaml", IMAGE), "no command"),
        (("slurm.sbatch",), "no command"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    ended = launch(*arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert re.fullmatch(rf"{arguments[0]}: .+[.]\n", ended.stderr), ended.stderr


def counting(tmp_path: Path, script: str) -> tuple[str, ...]:
    """A command whose attempts are counted in the file `attempts`; $n is their number."""
    attempts = tmp_path / "attempts"
    attempts.touch()
    return ("bash", "-c", f"echo x >> {attempts}; n=$(wc -l < {attempts}); {script}")


def attempts(tmp_path: Path) -> int:
    return len((tmp_path / "attempts").read_text().split())


@pytest.mark.parametrize(
    ("script", "code", "times"),
    [
        ("exit 0", 0, 1),
        ("exit 2", 2, 1),
        ("[ $n = 3 ]", 0, 3),
        ("[ $n = 2 ] && exit 2; exit 143", 2, 2),
        ("kill -9 $$", 137, 3),
    ],
)
def test_babysit_restarts_unless_done_or_wrong(tmp_path, script, code, times):
    ended = launch("babysit.sh", "--backoff=0", "--max_restarts=2", *counting(tmp_path, script))
    assert (ended.returncode, attempts(tmp_path)) == (code, times), ended.stderr


@pytest.mark.parametrize(
    ("script", "code", "times"),
    [
        ("echo 'mmqa: step 9: loss is nan' >&2; exit 1", 2, 2),
        ("echo '1: mmqa: step 9: nan, after '$n' s; go on' >&2; echo srun: $n >&2; exit 1", 2, 2),
        ("echo 'ValueError: a bug' >&2; exit 1", 2, 2),
        ('echo "F1125 19:22:0$n.4 12$n client.cc:9] a bug" >&2; exit 134', 2, 2),
        ('echo "mmqa: lost $((n % 2))" >&2; exit 1', 1, 4),  # two failures in turn
        ("echo mmqa: step $n: loss is nan >&2; exit 1", 1, 4),  # it advances
        ("echo 'mmqa: lost' >&2; exit $((n % 2 + 3))", 3, 4),  # by another exit code each time
        ("echo 'mmqa: lost' >&2; [ $n = 2 ]", 0, 2),
        ("echo 'mmqa: p.jpg is missing' >&2; exit 2", 2, 1),
    ],
)
def test_babysit_gives_up_where_nothing_advances(tmp_path, script, code, times):
    ended = launch("babysit.sh", "--backoff=0", "--max_restarts=3", *counting(tmp_path, script))
    assert (ended.returncode, attempts(tmp_path)) == (code, times), ended.stderr
    gave_up = "two starts in a row" in ended.stderr
    assert gave_up == (code == 2 and times == 2)
    if gave_up:
        assert "the same sentence: mend its cause" in ended.stderr
        assert re.search(r"nan|a bug", ended.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    "form", ["mmqa train --workdir=/runs/a", "{}/mmqa train --workdir /runs/a"]
)
@pytest.mark.parametrize(("steps", "times"), [("7 7", 2), ("7 8", 3)])
def test_babysit_asks_how_far_the_run_is(tmp_path, steps, times, form):
    """The same sentence at a later step is another failure."""
    (tmp_path / "status").write_text(steps.replace(" ", "\n"))
    fake = tmp_path / "mmqa"
    fake.write_text(
        "#!/bin/bash\n"
        f"count={tmp_path}/attempts; n=$(wc -l < $count)\n"
        f'if [ "$1" = status ]; then [ "$2" = /runs/a ] || exit 2; echo text\n'
        f"""  echo '{{"step": '$(sed -n "${{n}}p;\\$p" {tmp_path}/status | head -n 1)'}}'\n"""
        "else echo x >> $count; echo 'mmqa: the disk is full' >&2; exit 1; fi\n"
    )
    fake.chmod(0o755)
    (tmp_path / "attempts").touch()
    command = form.format(tmp_path).split()
    path = "" if "{}" in form else str(tmp_path)
    ended = launch("babysit.sh", "--backoff=0", *command, PATH=path)
    assert (ended.returncode, attempts(tmp_path)) == (2, times), ended.stderr
    assert f'at "step": {steps[-1]} and the same sentence' in ended.stderr


def test_babysit_remembers_a_failure_from_pod_to_pod(tmp_path):
    state = tmp_path / "state" / "host-0"
    flags = ("--max_restarts=0", f"--state={state}")
    failing = counting(tmp_path, "echo 'mmqa: lost' >&2; exit 1")
    codes = [launch("babysit.sh", *flags, *failing).returncode for _ in range(2)]
    assert codes == [1, 2]
    assert not state.exists()
    codes = [launch("babysit.sh", *flags, *failing).returncode]
    codes += [launch("babysit.sh", *flags, "true").returncode]
    codes += [launch("babysit.sh", *flags, *failing).returncode]
    assert codes == [1, 0, 1]


def test_babysit_waits_twice_as_long_each_time(tmp_path):
    fake = tmp_path / "sleep"
    fake.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/asked\n')
    fake.chmod(0o755)
    flags = ("--backoff=1", "--max_restarts=2")
    ended = launch("babysit.sh", *flags, "false", PATH=str(tmp_path))
    assert re.findall(r"in (\d+) s", ended.stderr) == ["1", "2"]
    asked = (tmp_path / "asked").read_text().split()
    assert [seconds for seconds in asked if seconds != "0.2"] == ["1", "2"]


def test_babysit_passes_term_on_and_stops(tmp_path):
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.1; done"
    with subprocess.Popen(
        ["bash", str(LAUNCH / "babysit.sh"), *counting(tmp_path, script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "saved\n"
    assert (process.returncode, attempts(tmp_path)) == (143, 1)


@pytest.mark.parametrize(
    ("counts", "members"),
    [((), ["a,b,c", "a,c", "a,b,c"]), (("--counts=1,3",), ["a,b,c", "a", "a,b,c"])],
)
def test_babysit_goes_on_with_the_members_that_are_left(tmp_path, counts, members):
    """`b` is lost in the first attempt and comes back in the second, which then saves."""
    there, lines = tmp_path / "there", tmp_path / "lines"
    there.write_text("a\nb\nc\n")
    script = f"""
        trap 'exit 143' TERM
        echo $MMQA_MEMBERS $MMQA_MEMBER_COUNT >> {lines}
        case $(wc -l < {lines}) in
          1) printf 'a\\nc\\n' > {there}; exit 137 ;;
          2) printf 'a\\nb\\nc\\n' > {there}; while :; do sleep 0.1; done ;;
        esac
    """
    ended = launch(
        *("babysit.sh", "--backoff=0", "--every=1", f"--members=cat {there}", *counts),
        *("bash", "-c", script),
    )
    assert ended.returncode == 0, ended.stderr
    assert lines.read_text().splitlines() == [f"{m} {len(m.split(','))}" for m in members]
    assert "a,b,c can take part: the run saves and starts again with them" in ended.stderr


def test_babysit_awaits_members(tmp_path):
    there = tmp_path / "there"
    script = "[ $MMQA_MEMBERS = one,two ]"
    ask = f"echo one; [ -e {there} ] && echo two; touch {there}"
    ended = launch(
        *("babysit.sh", "--counts=2", "--every=0", f"--members={ask}", "bash", "-c", script)
    )
    assert ended.returncode == 0, ended.stderr
    assert "too few members are there" in ended.stderr


def test_two_processes_are_told_who_they_are():
    script = (
        "echo $JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS on $JAX_PLATFORMS"
    )
    ended = launch("two_processes.sh", "--processes=3", "bash", "-c", script, JAX_PLATFORMS="cpu")
    assert ended.returncode == 0
    lines = sorted(ended.stdout.splitlines())
    address = re.search(r"127\.0\.0\.1:\d+", lines[0])[0]
    assert lines == [f"[{n}] {n} of 3 at {address} on cpu" for n in range(3)]


def test_one_that_fails_ends_the_others():
    began = time.monotonic()
    script = "[ $JAX_PROCESS_ID = 0 ] || exit 7; exec sleep 60"
    ended = launch("two_processes.sh", "bash", "-c", script)
    assert ended.returncode == 7
    assert time.monotonic() - began < 30
