# SPDX-License-Identifier: Apache-2.0
"""Hostile input to the NVMe code and to the store's headers: the corpus, and two minutes of what nobody wrote down.

``TARDIS_FUZZ_SECONDS`` and ``TARDIS_FUZZ_SEED`` change how long and from which seed: one and the same unless told, so
that what fails is a change; ``make soak ARGS=fuzz`` takes others. An input that fails is kept in ``TARDIS_BUILD_DIR``
(default: ``build/native``), and the message says how to execute it again.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("TARDIS_BUILD_DIR") or ROOT / "build" / "native").resolve()
PROGRAM = BUILD / "cpp" / "tests" / "tardis_nvme_fuzz"
CORPUS = ROOT / "cpp" / "tests" / "data" / "nvme_fuzz"
TARGETS = ("controller", "driver", "queue", "store", "volume")
SECONDS = float(os.environ.get("TARDIS_FUZZ_SECONDS", "120"))
LEAST_INPUTS = 10  # of each target in the corpus
HANG_SECONDS = 30.0  # for one input; the machine may do much else

SAID = re.compile(
    r"^(\w+): seed \d+, (\d+) of the corpus, (\d+) executions in [\d.]+ s, (\d+) features, ", re.MULTILINE
)


class Failure(AssertionError):
    """The fuzzer found something, or did not do what it was asked for."""


def fuzz(target, folder, *, seconds, seed, corpus=None, hang=HANG_SECONDS):
    """One run in `folder`, where an input that fails is kept; its executions, of the corpus and in all."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [PROGRAM, f"target={target}", f"seconds={seconds:g}", f"seed={seed}", f"hang={hang:g}"]
    if corpus is not None:
        command.append(f"corpus={corpus}")
    where = f"cd {shlex.quote(str(folder))} && {shlex.join(map(str, command))}"
    try:
        # The program ends what hangs; this is for the case that the program itself does not end.
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=seconds + 4 * hang + 60
        )
    except subprocess.TimeoutExpired as late:
        raise Failure(f"the fuzzer of target {target} did not end, seed {seed}:\n{where}") from late
    output = done.stdout + done.stderr
    if done.returncode != 0:
        failed = re.search(rf"input=(\S+failed-{target}-\w+\.hex)", done.stdout)
        again = (
            f"the input is kept; execute it again with\n"
            f"{PROGRAM} target={target} input={failed[1]} times=100\n"
            "and put it into the corpus, named after what it shows, once it is mended"
            if failed
            else f"the run again:\n{where}"
        )
        raise Failure(f"target {target}, seed {seed}, exit status {done.returncode}:\n{output}\n{again}")
    said = SAID.search(done.stdout)
    if said is None or said[1] != target:
        raise Failure(f"the fuzzer of target {target} says nothing of what it did:\n{output}\n{where}")
    return int(said[2]), int(said[3])


@pytest.fixture(autouse=True)
def built():
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM.name} was not built: make test builds it (TARDIS_BUILD_DIR names another build folder)")


@pytest.fixture
def seed():
    value = os.environ.get("TARDIS_FUZZ_SEED", "1")
    print(f"TARDIS_FUZZ_SEED={value}")
    return value


def failures():
    return BUILD / "nvme_fuzz_failures"


def test_every_target_has_a_corpus():
    assert sorted(folder.name for folder in CORPUS.iterdir()) == list(TARGETS)
    said = subprocess.run([PROGRAM, "target=none"], capture_output=True, text=True, check=False).stderr
    assert set(said.rpartition("expected one of: ")[2].strip().split(", ")) == {"all", "self", *TARGETS}, said


@pytest.mark.parametrize("target", TARGETS)
def test_corpus(target):
    inputs = list((CORPUS / target).glob("*.hex"))
    assert len(inputs) >= LEAST_INPUTS
    replayed, executed = fuzz(target, failures(), seconds=0, seed=1, corpus=CORPUS)
    assert replayed == len(inputs) and executed > replayed


def test_two_minutes_of_hostile_input(seed):
    """As many targets at a time as there are processors; all of them share the time."""
    workers = min(len(os.sched_getaffinity(0)), len(TARGETS))
    seconds = SECONDS * workers / len(TARGETS)
    found, executions = [], {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        runs = {
            target: pool.submit(fuzz, target, failures(), seconds=seconds, seed=seed, corpus=CORPUS)
            for target in TARGETS
        }
        for target, run in runs.items():
            try:
                executions[target] = run.result()
            except Failure as failure:
                found.append(str(failure))
    assert not found, "\n\n".join(found)
    print(", ".join(f"{target}: {executed} inputs" for target, (_, executed) in executions.items()))
    # A few inputs in all that time would be a fuzzer that hardly runs.
    assert all(executed - replayed >= seconds for replayed, executed in executions.values()), executions


# What the program's target `self` does with an input that begins so: it stands for a fault of the code under test.
FAULTS = {
    "an oracle": ("2a", r"broken: the input begins with 2a[\s\S]*times=100"),
    "a hang": ("2b", r"self: FAILED \(no end\)"),
    "a crash": ("2c", r"self: FAILED \((Segmentation fault|the process ended with an error)\)"),
    "an exit": ("2d", r"self: FAILED \(the process ended with an error\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_gate(fault, tmp_path):
    """In the corpus and by itself; and the message says how to see it again."""
    first_byte, expected = FAULTS[fault]
    (tmp_path / "corpus" / "self").mkdir(parents=True)
    (tmp_path / "corpus" / "self" / "bad.hex").write_text(first_byte + "\n")
    with pytest.raises(Failure, match=expected) as caught:
        fuzz("self", tmp_path / "run", seconds=0, seed=1, corpus=tmp_path / "corpus", hang=1)
    again = re.search(r"^(\S+ target=self input=\S+) times=100$", str(caught.value), re.MULTILINE)
    assert again is not None, str(caught.value)
    kept = pathlib.Path(again[1].rpartition("=")[2])
    assert kept.parent == tmp_path / "run" and kept.read_text().strip() == first_byte
    replay = subprocess.run([*shlex.split(again[1]), "hang=1"], cwd=tmp_path, capture_output=True, check=False)
    assert replay.returncode == 1


def test_a_fault_is_found_by_mutation(tmp_path, seed):
    with pytest.raises(Failure, match=r"self: FAILED"):
        fuzz("self", tmp_path, seconds=20, seed=seed, hang=1)


def test_a_corpus_that_is_not_there_fails_the_gate(tmp_path):
    (tmp_path / "queue").mkdir()
    with pytest.raises(Failure, match="has no inputs"):
        fuzz("queue", tmp_path, seconds=0, seed=1, corpus=tmp_path)
    (tmp_path / "queue" / "note.hex").write_text("no digits\n")
    with pytest.raises(Failure, match="expected bytes as pairs of hexadecimal digits"):
        fuzz("queue", tmp_path, seconds=0, seed=1, corpus=tmp_path)
