"""The language model example, run as a person runs it, on a text of its own."""

import random
import re

import pytest

from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "language_model.py"
SMALL = "--width 64 --blocks 2 --context 16 --steps 10 --replicas 2 --out run".split()
MEMORY = re.compile(
    r"each replica holds ([\d.]+) MB of weights, ([\d.]+) MB of optimizer state; "
    r"in a step ([\d.]+) MB with gradients"
)
LIMIT = ("--memory-limit-mb", "1.6")
LOSS = re.compile(r"loss: (\d\.\d{4}), held back: (\d\.\d{4})")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words of three letters out of ten: easy to do better on than by guessing."""
    rng = random.Random(2)
    words = ["".join(rng.choices("abcdefghij", k=3)) for _ in range(10)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choices(words, k=2000)))
    return path


def run(folder, text, *arguments):
    return run_python(EXAMPLE, *SMALL, "--text", text, *arguments, cwd=folder)


def trained(folder, text, *arguments):
    done = run(folder, text, *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    memory = [float(x) for line in lines for x in (MEMORY.findall(line) or [()])[0]]
    losses = [float(x) for x in LOSS.fullmatch(lines[-1]).groups()]
    return lines, memory, losses


def test_every_stage_learns_alike_and_holds_less(tmp_path, text):
    lines, whole, losses = trained(tmp_path, text)
    (picture,) = (line for line in lines if line.startswith("learning curve: "))
    assert (tmp_path / picture.removeprefix("learning curve: ")).is_file()
    assert any(re.match(r"peak memory of the process: \d", line) for line in lines)
    # 11 kinds of characters and 16 places: 112,651 weights, counted by hand: 11 x 64 +
    # 16 x 64; in a block 2 x 128, 4 (64 x 64 + 64), 64 x 256 + 256, 256 x 64 + 64;
    # 128 and 64 x 11 + 11.
    in_a_block = 256 + 4 * (64 * 64 + 64) + 64 * 256 + 256 + 256 * 64 + 64
    weights = 11 * 64 + 16 * 64 + 2 * in_a_block + 128 + 64 * 11 + 11
    assert f"{weights:,} weights" in lines[0]
    assert whole[0] == pytest.approx(4 * weights / 1e6, abs=0.005)
    assert whole[1] == pytest.approx(8 * weights / 1e6, abs=0.005)
    assert whole[2] == pytest.approx(16 * weights / 1e6, abs=0.005)

    # Of stage 0 this limit is exceeded, as the next test shows.
    fits, half_state, losses_1 = trained(tmp_path, text, *LIMIT, "--shard", "optimizer")
    assert "fits into the limit of 1.60 MB" in fits
    assert half_state[2] <= 1.6
    _, half, losses_3 = trained(tmp_path, text, "--shard", "parameters")
    # Two matrices of a block, of 64 KiB each, are large enough to be cut in two.
    cut = 2 * 2 * 64 * 256 * 4 / 1e6
    assert half_state[0] == whole[0]
    assert half_state[1] == pytest.approx(whole[1] - cut, abs=0.011)
    assert half[0] == pytest.approx(whole[0] - cut / 2, abs=0.011)
    assert half[1] == half_state[1]
    # Two replicas add alike whatever is cut, computed twice or not; four digits.
    assert losses_1 == losses_3
    # Guessing among eleven characters costs ln 11 = 2.40.
    assert losses[0] < 2.3 and losses_3[0] < 2.3


def test_what_does_not_fit_is_refused_before_training_with_what_would(tmp_path, text):
    refused = run(tmp_path, text, *LIMIT)
    assert refused.returncode == 2
    assert "Epoch" not in refused.stdout
    assert re.search(
        r"does not fit: 1\.\d\d MB for each replica is more than the limit of "
        r"1\.60 MB\. It fits with --shard optimizer\.",
        refused.stderr,
    )
    hopeless = run(tmp_path, text, "--memory-limit-mb", "0.1")
    assert hopeless.returncode == 2
    assert "take more --replicas or a smaller --width" in hopeless.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--width", "30"), "--width must be divisible by the 4 attention heads"),
        (("--steps", "0"), "must be at least 1, received 0"),
        (("--shard", "weights"), "invalid choice: 'weights'"),
        (("--context", "9000"), "the text is too short: "),
    ],
)
def test_other_arguments_are_refused(tmp_path, text, arguments, message):
    done = run(tmp_path, text, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
