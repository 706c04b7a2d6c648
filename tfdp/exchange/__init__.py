"""From the replicas' gradients to their sums: buckets in flight, engines, wire types.

pipeline              the way of the gradients through one step: read it first
reducer               the one contract between a step and what moves its tensors
sparse                gradients of embeddings
compressed            gradients in fewer bytes, by a method of tfdp.compression
peers, choose_peers   who exchanges them
replica_peers         all replicas; host_peers, level_peers: one of each host
wire_dtype            gradients in a smaller type, and back, between TPU cores
host_group            the hosts that train together
engine                the interface of an engine; a third is one file
in_process            replicas of one process hand tensors to each other
hand_over             how they do that, without a copy
collectives           TensorFlow's collectives: NCCL on GPUs
two_level             replicas of a host first, then hosts over a link
link_calls            calls of Python from a graph, in one order on all hosts
two_level_shards      the same, to shards
two_level_collectives hosts over TensorFlow's collectives
tpu, tpu_ops          sums over TPU cores
choose_engine         which engine suits which devices
packing, pieces       several tensors in one buffer; large ones cut
shard_packing, shard_pieces  the same for shards
wire_types            number types on the wire
collective_keys       by which TensorFlow finds the partners of a collective
collective_order      where TensorFlow puts the members of a group
round_sizes           few sizes, for tensors of unknown size over NCCL
traffic               how many bytes a step sends
traffic_meter         how many the steps that ran have sent

All calls are made once per replica, in replica context, while a graph is built.
"""
