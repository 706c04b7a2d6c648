"""Data loaders' processes import the script anew, and are no workers of the cluster."""

import json

import pytest

from tests.support.launching import Launches

# The strategy and the model are made when the script is imported, in helpers as well.
SCRIPT = """
import json, multiprocessing
import tfdp
import keras
import numpy as np

strategy = tfdp.{strategy}
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

def facts():
    return strategy.num_replicas_in_sync, strategy.cluster.rank, strategy.is_chief

def helper(queue, batch):
    strategy.barrier("in a helper")  # waits for nobody
    refused = []
    for use in (
        lambda: model.fit(batch, batch[:, :1], verbose=0),
        lambda: strategy.run(lambda: 1.0),
    ):
        try:
            use()
        except tfdp.errors.ConfigurationError as error:
            refused.append(str(error))
    queue.put((facts(), batch, refused))

if __name__ == "__main__":
    batch = np.arange(32, dtype="float32").reshape(8, 4) / 32
    if RANK in {ranks}:
        context = multiprocessing.get_context("{method}")
        queue = context.Queue()
        children = [
            context.Process(target=helper, args=(queue, batch)) for _ in range(2)
        ]
        for child in children:
            child.start()
        told = [queue.get(timeout=300) for _ in children]
        for child in children:
            child.join()
        (seen, batch, refused), _ = told
        note(f"helped-{{RANK}}", json.dumps(
            [seen == facts(), refused, [child.exitcode for child in children]]
        ))
    model.fit(batch, batch[:, :1], batch_size=4, epochs=2, verbose=0)
    weights = model.get_weights()[0].sum()
    note(f"trained-{{RANK}}", json.dumps(float(weights)))
"""
OWN = "tfdp.Cluster(2, RANK, f'{HOST}:{PORT}', job_key='k' * 16)"
FORMS = {
    "both": ("auto_strategy()", "spawn", (0, 1)),
    "chief": ("auto_strategy()", "spawn", (0,)),
    "other": ("auto_strategy(balance='speed')", "spawn", (1,)),
    "given": (f"MultiHostDataParallelStrategy({OWN})", "forkserver", (1,)),
    "shards": ("auto_strategy(shard='parameters')", "spawn", (0,)),
}


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "form",
    [
        "chief",
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in FORMS
            if form != "chief"
        ),
    ],
)
def test_helpers_join_no_cluster_and_say_nothing(tmp_path, form):
    strategy, method, ranks = FORMS[form]
    script = SCRIPT.format(strategy=strategy, method=method, ranks=ranks)
    with Launches(tmp_path) as launches:
        code, _, errors, _ = launches.run(script, "--workers", "2")
    assert code == 0, errors
    assert not any("never used" in line or "hello" in line for line in errors)
    weights = [json.loads((tmp_path / f"trained-{n}").read_text()) for n in range(2)]
    assert weights[0] == weights[1]
    for rank in range(2):
        told = tmp_path / f"helped-{rank}"
        assert told.exists() == (rank in ranks)
        if rank in ranks:
            is_same, refused, codes = json.loads(told.read_text())
            assert is_same and codes == [0, 0]
            assert len(refused) == 2
            for message in refused:
                assert f"a helper of worker {rank} of 2" in message
