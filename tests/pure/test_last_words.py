"""What a worker leaves for its launcher, and what the launcher makes of it."""

import json

import pytest

from tests.support.fresh_python import run_program
from tfdp.cluster.crash_report import (
    CrashReport,
    cause_of,
    parse_crash_report,
    read_crash_report,
)

WORDS = CrashReport("ValueError: no", "Traceback\n", 12.5, False)


def test_words_come_back():
    assert parse_crash_report(WORDS.to_json().encode()) == WORDS


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100_000,
        b"3",
        b"\xff\xfe",
        json.dumps({"error": "E"}).encode(),
        json.dumps({**json.loads(WORDS.to_json()), "error": 3}).encode(),
        json.dumps({**json.loads(WORDS.to_json()), "time_seconds": "x"}).encode(),
        json.dumps({**json.loads(WORDS.to_json()), "is_consequence": 1}).encode(),
    ],
)
def test_nonsense_is_no_word(text, tmp_path):
    assert parse_crash_report(text) is None
    (tmp_path / "7.json").write_bytes(text)
    assert read_crash_report(str(tmp_path), 7) is None
    assert read_crash_report(str(tmp_path), 8) is None


# As TensorFlow writes them, frames and all.
FRAMES = "\n\n".join(f'  File "/home/a/train.py", line {n}, in f' for n in range(40))
GRAPH = (
    "Graph execution error:\n\nDetected at node a defined at (most recent call last):"
)
OP = "\t [[{{node a}}]]"
CAUSES = {
    "no row\n  7 of 8": f"{GRAPH}\n{FRAMES}\n\nno row\n  7 of 8\n{OP} [Op:f]",
    "OOM in a": f"{GRAPH}\n{FRAMES}\n\nOOM in a\n{OP}\nHint: see\n [Op:f]",
    "ValueError: no row": (
        f"{GRAPH}\n<stack traces unavailable>\nValueError: no row\n"
        'Traceback (most recent call last):\n\n  File "/home/a.py", line 3, in f\n'
        "    raise ValueError('no row')\n           ^^^^^\n\nValueError: no row\n\n\n"
        "\t [[{{node PyFunc}}]]\n\t [[IteratorGetNext]] [Op:f]"
    ),
    "    ValueError: no\n    row": (
        'in user code:\n\n    File "/home/a.py", line 3, in f  *\n'
        '        raise ValueError("no\\nrow")\n\n    ValueError: no\n    row\n'
    ),
    "assertion failed: [x]": (
        "{{function_node __wrapped__Get_device_/job:a}} assertion failed: [x]\n"
        "\t [[{{function_node b}}{{node c}}]] [Op:Get]"
    ),
    "first\nsecond [[1]]": "first\nsecond [[1]]",
    FRAMES: FRAMES,  # nothing else is said
}


@pytest.mark.parametrize("cause", CAUSES)
def test_of_a_long_message_the_cause_is_kept(cause):
    assert cause_of(CAUSES[cause]) == cause


PROGRAM = f"""
GRAPH_ERROR = {CAUSES["OOM in a"]!r}
import os
from tfdp.errors import WorkerLostError
from tfdp.cluster import crash_report
from tfdp.hosts import waits

crash_report.listen()
crash_report.listen()
print(os.getpid(), flush=True)
"""
ENDINGS = {
    "raise ValueError('é\\n' + 'x' * 1000)": ("ValueError: é xxx", False),
    "raise WorkerLostError('gone')": ("WorkerLostError: gone", True),
    # As TensorFlow buries it.
    "raise RuntimeError('2 root errors: WorkerLostError: gone')": (
        "RuntimeError",
        True,
    ),
    "waits.log_lost(0, 1.0, 'x', 'y'); raise OSError('end')": ("OSError", True),
    # A stack in a message is no cause, and takes no room from it.
    "raise RuntimeError(GRAPH_ERROR)": ("RuntimeError: OOM in a", False),
    "print(1 / 0)": ("ZeroDivisionError: division by zero", False),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_error_is_noted(ending, tmp_path):
    error, is_consequence = ENDINGS[ending]
    done = run_program(PROGRAM + ending, environment={"TFDP_LAST_WORDS": str(tmp_path)})
    assert done.returncode == 1
    words = read_crash_report(str(tmp_path), int(done.stdout.split()[0]))
    assert words.error.startswith(error)
    assert len(words.error) <= 300
    assert words.is_consequence == is_consequence
    # Python's own report comes as ever, once.
    assert done.stderr.count("Traceback") == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize("folder", ["", "/nowhere/at/all"])
def test_without_a_folder_errors_are_as_ever(folder):
    done = run_program(
        PROGRAM + "raise ValueError('plain')", environment={"TFDP_LAST_WORDS": folder}
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: plain")


BURIED = """
import tensorflow as tf
def fail():
    raise CollectiveError("Worker 1 reads another\\nfirst batch.")
def step():
    tf.numpy_function(fail, [], [])
from tfdp.errors import CollectiveError
tf.function(step)()
"""


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_error_of_tfdp_in_one_of_tensorflow_is_printed_alone(tmp_path, is_whole):
    variables = {"TFDP_LAST_WORDS": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    variables["TFDP_WHOLE_TRACEBACKS"] = "1" if is_whole else "0"
    done = run_program(PROGRAM + BURIED, environment=variables)
    lines = done.stderr.splitlines()
    assert ("Detected at node" in done.stderr) == is_whole
    if not is_whole:
        start = lines.index("Traceback (most recent call last):")
        assert lines[-3:-1] == [
            "tfdp.errors.CollectiveError: Worker 1 reads another",
            "first batch.",
        ]
        assert len(lines) - start <= 7
    words = read_crash_report(str(tmp_path), int(done.stdout.split()[0]))
    assert words.error == "CollectiveError: Worker 1 reads another first batch."
    assert "Detected at node" not in words.traceback


def test_the_loss_of_a_worker_is_printed_without_frames_of_tfdp(tmp_path):
    lost = """
from tfdp.hosts.python_calls import counted
def fail():
    raise WorkerLostError("gone")
counted(fail)()
"""
    done = run_program(PROGRAM + lost, environment={"TFDP_LAST_WORDS": str(tmp_path)})
    words = read_crash_report(str(tmp_path), int(done.stdout.split()[0]))
    assert words.error == "WorkerLostError: gone" and words.is_consequence
    assert "python_calls.py" not in done.stderr + words.traceback
    assert "tfdp.errors.WorkerLostError: gone\n" in done.stderr


def test_who_comes_to_the_end_says_nothing(tmp_path):
    done = run_program(PROGRAM, environment={"TFDP_LAST_WORDS": str(tmp_path)})
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
