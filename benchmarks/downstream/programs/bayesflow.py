"""BayesFlow: approximators with training steps of their own, by its workflow."""

from __future__ import annotations

from typing import Any

import bayesflow
import keras
import numpy as np

import tfdp
from benchmarks.downstream.cases import BATCH, EPOCHS, Numbers, draw

ROWS, OBSERVATIONS = 42, 5  # the library leaves out no rows: the last batch has two


def _data(*wanted: str) -> dict[str, np.ndarray]:
    theta = draw(ROWS, 2)
    observed = theta[:, None] + 0.1 * draw(ROWS, OBSERVATIONS, 2)
    data = {"theta": theta, "observed": observed, "means": observed.mean(1)}
    return {name: data[name] for name in ("theta", *wanted)}


def _coupling_flow() -> Any:
    subnet = {"widths": (16,), "dropout": 0.0}
    return bayesflow.networks.CouplingFlow(depth=2, subnet_kwargs=subnet)


def _by_workflow(network: Any, **options: Any) -> Numbers:
    """As the library's documentation trains; its losses are means of own rows."""
    workflow = bayesflow.BasicWorkflow(
        inference_network=network, inference_variables=["theta"], **options
    )
    history = workflow.fit_offline(
        _data("means"), epochs=EPOCHS, batch_size=BATCH, verbose=0
    )
    return {name: np.asarray(values) for name, values in history.history.items()}


def _derived(library: Any, network: Any, **names: Any) -> Numbers:
    """With the class that docs/own-losses.md derives; weights are compared."""

    class OnReplicas(library):
        def compute_metrics(self, *args, **kwargs):
            metrics = super().compute_metrics(*args, **kwargs)
            return {**metrics, "loss": tfdp.losses.local_mean(metrics["loss"])}

    adapter = bayesflow.BasicWorkflow.default_adapter(
        inference_variables=["theta"],
        inference_conditions=names.get("inference_conditions"),
        summary_variables=names.get("summary_variables"),
    )
    approximator = OnReplicas(
        inference_network=network,
        adapter=adapter,
        standardize=None,
        summary_network=names.get("summary_network"),
    )
    approximator.compile(keras.optimizers.SGD(1e-3, momentum=0.9))
    wanted = names.get("inference_conditions") or names["summary_variables"]
    dataset = bayesflow.OfflineDataset(_data(*wanted), BATCH, adapter, shuffle=False)
    approximator.fit(dataset=dataset, epochs=EPOCHS, verbose=0)
    return {weight.path: weight.numpy() for weight in approximator.weights}


def coupling_flow_by_workflow() -> Numbers:
    network = _coupling_flow()
    return _by_workflow(network, inference_conditions=["means"], standardize=None)


def coupling_flow_that_standardizes_by_workflow() -> Numbers:
    """Means and deviations are gathered while it trains."""
    return _by_workflow(_coupling_flow(), inference_conditions=["means"])


def flow_matching_by_workflow() -> Numbers:
    """Replicas draw other times and noise than one device."""
    network = bayesflow.networks.FlowMatching(
        subnet_kwargs={"widths": (16,), "dropout": 0.0}
    )
    return _by_workflow(network, inference_conditions=["means"], standardize=None)


def coupling_flow_derived() -> Numbers:
    library = bayesflow.ContinuousApproximator
    return _derived(library, _coupling_flow(), inference_conditions=["means"])


def deep_set_summaries_derived() -> Numbers:
    return _derived(
        bayesflow.ContinuousApproximator,
        _coupling_flow(),
        summary_network=bayesflow.networks.DeepSet(summary_dim=4, depth=1, dropout=0.0),
        summary_variables=["observed"],
    )


def point_estimates_derived() -> Numbers:
    network = bayesflow.networks.ScoringRuleNetwork(
        scoring_rules={"mean": bayesflow.scoring_rules.MeanScore()},
        subnet_kwargs={"widths": (16,), "dropout": 0.0},
    )
    library = bayesflow.ScoringRuleApproximator
    return _derived(library, network, inference_conditions=["means"])


CASES = {
    function.__name__: function
    for function in (
        coupling_flow_by_workflow,
        coupling_flow_that_standardizes_by_workflow,
        flow_matching_by_workflow,
        coupling_flow_derived,
        deep_set_summaries_derived,
        point_estimates_derived,
    )
}
