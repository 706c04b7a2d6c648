"""The graphs that TensorFlow ran, as its optimizer and its placer left them."""

from tensorflow.python.eager import context


def run_graphs(run):
    """Return the part of each device of every graph that ``run()`` runs first.

    The record belongs to the process: what another left in it is thrown away, and it
    is closed again, since the next one would read this one's graphs as its own.
    """
    record = context.context()
    record.enable_graph_collection()
    record.export_run_metadata()
    try:
        run()
        graphs = record.export_run_metadata().function_graphs
    finally:
        record.disable_graph_collection()
    return [part for graph in graphs for part in graph.partition_graphs]
