"""Parts of the names of ops, by which readers of a graph recognize exchanges."""

#: Calls of a link between hosts, and calls that begin an exchange which another ends.
LINK_CALL = "tfdp_link_call"
LINK_BEGIN = "tfdp_link_begin"
#: Ops that compress gradients, and add what others have compressed.
COMPRESSED_SUM = "tfdp_compressed_sum"
#: The conditional that returns compressed sums where all numbers are finite.
WHERE_FINITE = "tfdp_where_finite"
