"""Sums gradients over the replicas: buckets, transports, number types on the wire.

reducer                 the path of gradients through one step: read it first
transport               the one interface of everything that moves tensors
ordering                who waits for whom among replicas
link_calls              who waits for whom between hosts
in_process              replicas of one process hand over tensors
send_receive            how they do that, without a copy
collectives             TensorFlow's collectives: NCCL on GPUs
levels                  first the replicas of a host, then the hosts
over_link               hosts over a link
over_collectives        hosts over TensorFlow's collectives
tpu                     TPU cores
sparse                  gradients of embeddings
compressed              gradients compressed by a method of tfdp.compression
late_exchange           asynchronous sums between hosts
host_group              the hosts that train together
elastic_pipeline        a host that trains independently of hosts that may die
choose_engine           which engine suits which devices
packing                 several tensors or shards in one buffer
wire_types              number types on the wire
traffic                 how many bytes a step sends
op_names                how a reader of a graph recognizes exchanges

Every replica makes all calls once, in replica context, while a graph is built.
"""
