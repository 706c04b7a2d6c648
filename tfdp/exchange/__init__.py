"""The wire: engines that sum and gather tensors between replicas.

`engine` is the interface; `in_process` and `tensorflow` implement it. All calls are
made once per replica, in replica context, while a graph is built.
"""
