"""How many files ask a question that the core should decide once.

A question is decided in its own files; each other file that asks it is one more that a
change of the answer, or a new feature, has to touch. The numbers may only fall.
"""

import ast
import dataclasses
import functools
import re
import tokenize

import pytest

from tests.support.package_source import PACKAGE


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, in the names by which code asks it.

    Args:
      names: a pattern; it is searched in code without texts, comments and imports.
      decided_in: the files, or the beginnings of their paths, that own the answer, or
        in which the word has another meaning.
      most_files: how many others ask it.
    """

    names: str
    decided_in: tuple[str, ...]
    most_files: int


QUESTIONS = {
    "Is this step eager?": Question(
        r"eager",
        (
            *("_private/functions", "lint/registry", "step/as_one_device"),
            "_private/tpu_names",
        ),
        12,
    ),
    "Is it one compiled program of all replicas?": Question(
        r"(?<![a-z])(tpu|TPU)|is_compiled|compiles_steps|in_compiled_function|is_jitted"
        r"|jit_compile",
        (
            *("cluster/tpu", "exchange/tpu", "sharding/tpu", "strategies/tpu"),
            *("variables/tpu", "_private/tpu", "_private/names", "plan/options"),
            *("strategies/auto", "strategies/keras_distribution", "step/jit"),
            # Functions of their own are compiled, and the name of an error.
            *("variables/bit_hash", "errors"),
        ),
        18,
    ),
    "Is it in shards?": Question(
        r"[sS]hard",
        (
            *("chain/shards", "cluster/", "data/", "exchange/shards", "launch/"),
            *("plan/shards", "strategies/absent_hosts", "variables/in_shards"),
            *("sharding/", "_private/grain", "plan/options", "step/features"),
            "step/tables",  # tables in shards
            # Blocks of a mesh are shards; an argument of Keras is named so.
            *("grid/", "plan/mesh", "strategies/keras_distribution"),
        ),
        12,
    ),
    "Is this gradient rows of a table?": Question(
        r"IndexedSlices|sum_rows|repeated_rows|all_reduce_rows",
        (
            *("chain/table_rows", "compression/blocks", "exchange/sparse"),
            *("hosts/row_sums", "step/tables"),
        ),
        15,
    ),
    "Is this local training?": Question(
        r"\.is_local\b|groups_across|group_of\("
        r"|LocalView|\.sync\b|train_in\(|train_apart|local_view",
        (
            *("chain/groups", "exchange/late", "lint/", "step/make_local"),
            *("step/async_means", "step/backup_rounds", "step/elastic_rounds"),
            *("step/late_sums", "step/local_", "step/own_pace", "step/owned"),
            *("step/quorum_rounds", "sync/", "variables/local_view"),
        ),
        16,
    ),
    "Are these rows real?": Question(
        r"dummy|padded|padding|own_part|synthetic",
        (
            *("chain/missing", "data/padding", "step/rows", "tracing/rows"),
            # Elements of a dataset that have no rows, and a host's rows of a batch.
            *("_private/host_input", "data/hosts", "strategies/multi_host_loops"),
            # Padding of examples, by the op Pad, and of what is sent.
            *("data/pipeline", "lint/axes", "lint/rules", "hosts/mpi_link"),
            *("exchange/collectives", "exchange/in_process", "exchange/packing"),
            "compression/blocks",
        ),
        11,
    ),
}


@functools.cache
def code_of(path):
    """The names, numbers and signs of a file, line by line, without its imports."""
    lines = {}
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP):
                lines.setdefault(token.start[0], []).append(token)
    texts = []
    for tokens in lines.values():
        if tokens[0].string not in ("from", "import"):
            texts.append("".join(spaced(tokens)))
    return "\n".join(texts)


def spaced(tokens):
    """The tokens of a line, with a blank where two names would become one."""
    before = None
    for token in tokens:
        if before is not None and before.type == token.type == tokenize.NAME:
            yield " "
        yield token.string
        before = token


def files_that_ask(question):
    asking = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(("tools/", *question.decided_in)):
            continue
        if re.search(question.names, code_of(path)):
            asking.append(name)
    return asking


@pytest.mark.parametrize("sentence", QUESTIONS)
def test_a_question_is_asked_in_no_more_files(sentence):
    question = QUESTIONS[sentence]
    asking = files_that_ask(question)
    assert len(asking) <= question.most_files, asking
    assert len(asking) == question.most_files, f"lower most_files to {len(asking)}"


def test_a_step_has_few_fields():
    """A feature's state is in a file of its own; see `Step.of`."""
    tree = ast.parse((PACKAGE / "tracing" / "step.py").read_text("utf-8"))
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    targets = {
        name: [
            target
            for node in ast.walk(classes[name])
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in getattr(node, "targets", None) or [node.target]
        ]
        for name in ("Step", "Trace")
    }
    in_body = [one for one in classes["Step"].body if isinstance(one, ast.AnnAssign)]
    assert len(in_body) <= 12
    of_self = {
        one.attr
        for target in targets["Trace"]
        for one in ast.walk(target)
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
        if one.value.id == "self"
    }
    assert len(of_self) <= 8, of_self
