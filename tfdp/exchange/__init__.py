"""Sums gradients over the replicas: buckets, engines, number types on the wire.

pipeline                the path of gradients through one step: read it first
reducer                 the protocol between a step and what moves its tensors
sparse                  gradients of embeddings
compressed              gradients compressed by a method of tfdp.compression
peers, peer_groups      which replicas exchange compressed gradients
late_exchange           asynchronous sums between hosts
engine                  the interface of an engine
in_process              replicas of one process hand over tensors
send_receive            how they do that, without a copy
collectives             TensorFlow's collectives: NCCL on GPUs
two_level               first the replicas of a host, then the hosts over a link
two_level_shards        the same, for shards
two_level_collectives   hosts over TensorFlow's collectives
host_calls              ordered Python callbacks from a graph
host_group              the hosts that train together
elastic_pipeline        a host that trains independently of hosts that may die
tpu                     sums over TPU cores
choose_engine           which engine suits which devices
packing                 several tensors or shards in one buffer
wire_types              number types on the wire
traffic                 how many bytes a step sends

Every replica makes all calls once, in replica context, while a graph is built.
"""
