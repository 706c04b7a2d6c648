"""Peaks of small hand-made steps, computed by hand."""

import pytest

from tfdp.tools.planning.any_rows import AnyRows, UnclearLength, rows_to_trace
from tfdp.tools.planning.liveness import ORDERS, dry_run, variables_in_link_buffers
from tfdp.tools.planning.memory_plan import most_peak_bytes, needed_for
from tfdp.tools.planning.op_rules import (
    Tensor,
    flops_of,
    reused_inputs,
    scratch_bytes_of,
    shared_input,
)
from tfdp.tools.planning.step_graph import Op, StepGraph, StoredVariable


def peak(*ops, variables=(), results=(), threads=1):
    graph = StepGraph(tuple(ops), tuple(variables), tuple(results))
    return dry_run(graph, threads).peak_bytes


def made(size_bytes, *inputs, **more):
    return Op("MatMul", tuple((i, 0) for i in inputs), (), (size_bytes,), **more)


def test_the_margin_and_its_inverse():
    assert needed_for(100 * 2**20) == 126 * 2**20
    assert most_peak_bytes(126 * 2**20) == 100 * 2**20


def test_a_chain_holds_two_of_its_tensors_at_a_time():
    # 100 | 100 + 10 | 10 + 200 | 200 + 1
    assert peak(made(100), made(10, 0), made(200, 1), made(1, 2)) == 210


def test_what_the_backward_pass_reads_lives_until_then():
    # Forward a=100, b=10, c=1; backward of b reads a: 100 + 10 + 1, then 100 + 1 + 50.
    ops = [made(100), made(10, 0), made(1, 1), made(50, 2, 0)]
    assert peak(*ops) == 151


def test_a_tensor_that_nobody_reads_is_gone_when_its_op_has_run():
    assert peak(made(100), made(30), threads=1) == 100


def test_two_threads_hold_what_both_make():
    assert peak(made(100), made(30), threads=2) == 130


def test_results_live_until_the_end():
    assert peak(made(100), made(30), results=[(0, 0)]) == 130


def test_a_reshape_has_no_memory_of_its_own():
    reshape = Op("Reshape", ((0, 0),), (), (100,), shares=(0,))
    # 100, and 7 beside it: what is reshaped lives while it is read.
    assert peak(made(100), reshape, made(7, 1)) == 107


def test_an_op_writes_into_an_input_that_nobody_else_holds():
    relu = Op("Relu", ((0, 0),), (), (100,), reuses=(0,))
    assert peak(made(100), relu, made(1, 1)) == 101


def test_an_op_does_not_write_into_what_is_read_later():
    relu = Op("Relu", ((0, 0),), (), (100,), reuses=(0,))
    assert peak(made(100), relu, made(1, 1, 0)) == 201


def test_an_op_does_not_write_into_a_tensor_of_another_size():
    widened = Op("Mul", ((0, 0),), (), (300,), reuses=(0,))
    assert peak(made(100), widened) == 400


def test_scratch_memory_is_there_while_the_op_runs():
    assert peak(made(10, scratch_bytes=500), made(200)) == 510


def test_variables_are_there_all_the_time():
    weights = StoredVariable(1000, "weights")
    assert peak(made(10), variables=[weights]) == 1010


def reading():
    return Op("ReadVariableOp", (), (), (1000,), variable=0, access="read")


def test_reading_a_variable_takes_no_memory():
    weights = StoredVariable(1000, "weights")
    assert peak(reading(), made(10, 0), variables=[weights]) == 1010


def adding(*inputs, controls=()):
    return Op(
        "AssignAddVariableOp",
        tuple((i, 0) for i in inputs),
        tuple(controls),
        variable=0,
        access="add",
    )


def test_adding_to_a_variable_is_in_place():
    weights = StoredVariable(1000, "weights")
    # The variable and what is added.
    assert peak(made(1000), adding(0), variables=[weights]) == 2000


def test_adding_to_a_variable_that_is_still_read_makes_a_copy():
    weights = StoredVariable(1000, "weights")
    ops = [reading(), made(1000), adding(1, controls=[0]), made(1, 0)]
    ops[3] = Op("MatMul", ((0, 0),), (2,), (1,))  # reads the old value afterwards
    assert peak(*ops, variables=[weights]) == 3000


def test_assigning_hands_the_memory_over():
    weights = StoredVariable(1000, "weights")
    assign = Op("AssignVariableOp", ((0, 0),), variable=0, access="assign")
    # The new value and the old one; then the new one alone, and 500.
    ops = [made(1000), assign, Op("MatMul", (), (1,), (500,))]
    assert peak(*ops, variables=[weights]) == 2000


def test_control_edges_keep_ops_back():
    # Both at once would be 600.
    ops = [made(300), made(1, 0), Op("MatMul", (), (1,), (300,))]
    assert peak(*ops, threads=2) == 301


def test_the_parts_add_up_to_the_peak():
    graph = StepGraph(
        (made(10), made(20, 0, part="gradients")), (StoredVariable(5, "slots"),)
    )
    found = dry_run(graph)
    assert found.parts == {"slots": 5, "activations": 10, "gradients": 20}
    assert found.peak_bytes == 35


def test_ops_that_wait_for_each_other_are_an_error():
    ops = (Op("A", controls=(1,)), Op("B", controls=(0,)))
    with pytest.raises(ValueError, match="2 ops of the step wait"):
        dry_run(StepGraph(ops))


def test_the_same_step_has_the_same_peak_each_time():
    ops = tuple(made(10 + i, *([i // 2] if i else [])) for i in range(60))
    found = {dry_run(StepGraph(ops), 2).peak_bytes for _ in range(3)}
    assert len(found) == 1


FLOAT = 4


@pytest.mark.parametrize(
    "kind,inputs,output,flops",
    [
        ("MatMul", [(2, 3), (3, 5)], (2, 5), 2 * 2 * 3 * 5),
        ("BatchMatMulV2", [(7, 2, 3), (7, 3, 5)], (7, 2, 5), 7 * 2 * 2 * 3 * 5),
        # 3 x 3 x 8 products for each of 4 x 6 x 6 x 16 numbers.
        ("Conv2D", [(4, 8, 8, 8), (3, 3, 8, 16)], (4, 6, 6, 16), 2 * 72 * 4 * 36 * 16),
        (
            "DepthwiseConv2dNative",
            [(4, 8, 8, 8), (3, 3, 8, 1)],
            (4, 6, 6, 8),
            2 * 9 * 4 * 36 * 8,
        ),
        ("AddV2", [(4, 5), (4, 5)], (4, 5), 20),
        ("Reshape", [(4, 5), (1,)], (20,), 0),
    ],
)
def test_flops(kind, inputs, output, flops):
    tensors = [Tensor(shape, FLOAT) for shape in inputs]
    assert flops_of(kind, tensors, [Tensor(output, FLOAT)]) == flops


def test_rows_of_a_tensor_lie_in_it():
    whole, rows = Tensor((8, 3), FLOAT), Tensor((2, 3), FLOAT)
    assert shared_input("StridedSlice", [whole], [rows], 0) == 0
    columns = Tensor((8, 1), FLOAT)
    assert shared_input("StridedSlice", [whole], [columns], 0) is None
    assert shared_input("MatMul", [whole], [rows], 0) is None


def test_elementwise_ops_may_reuse_any_input():
    assert reused_inputs("AddV2", [Tensor((), FLOAT)] * 2) == (0, 1)
    assert reused_inputs("MatMul", [Tensor((), FLOAT)] * 2) == ()


@pytest.mark.parametrize(
    "equation,shapes,output,copied",
    [
        # [free, summed] and [summed, free]: nothing is copied.
        ("abc,cde->abde", [(2, 3, 5), (5, 7, 11)], (2, 3, 7, 11), 0),
        # Both operands and the result (batch a c, free e, free b) lie otherwise.
        (
            "aecd,abcd->acbe",
            [(2, 3, 5, 7), (2, 11, 5, 7)],
            (2, 5, 11, 3),
            210 + 770 + 330,
        ),
        # The first lies well, the second and the result do not.
        ("acbe,aecd->abcd", [(2, 5, 11, 3), (2, 3, 5, 7)], (2, 11, 5, 7), 210 + 770),
    ],
)
def test_an_einsum_copies_what_lies_otherwise(equation, shapes, output, copied):
    tensors = [Tensor(shape, 1) for shape in shapes]
    found = scratch_bytes_of("Einsum", tensors, [Tensor(output, 1)], equation)
    assert found == copied


def test_large_depthwise_filters_have_gradients_in_blocks_of_groups():
    kind = "DepthwiseConv2dNativeBackpropFilter"
    image, sizes = Tensor((8, 6, 6, 96), 4), Tensor((4,), 4)
    # 16 x 16 channels for each of 5 x 5 x 96 numbers; a kernel of its own for 3 x 3.
    made = [Tensor((5, 5, 96, 1), 4)]
    assert scratch_bytes_of(kind, [image, sizes, image], made) == 25 * 96 * 256 * 4
    twenty = [Tensor((5, 5, 96, 20), 4)]
    assert scratch_bytes_of(kind, [image, sizes, image], twenty) == 25 * 96 * 512 * 4
    for shape in ((3, 3, 96, 1), (2, 3, 96, 1), None):
        assert scratch_bytes_of(kind, [image, sizes, image], [Tensor(shape, 4)]) == 0


def test_an_order_of_ops_can_be_asked_for_again():
    ops = [made(100 + n) for n in range(9)]
    ops += [made(1, *range(n, n + 4)) for n in range(5)]
    graph = StepGraph(tuple(ops))
    found = dry_run(graph)
    alone = [dry_run(graph, orders=(order,)) for order in range(ORDERS)]
    assert found.peak_bytes == max(each.peak_bytes for each in alone)
    assert dry_run(graph, orders=(found.order,)) == found


def test_lengths_that_the_rows_divide_are_of_the_batch():
    rows = AnyRows(101, 8, fixed={50})
    assert [rows.length(n) for n in (0, 1, 101, 6464, 50)] == [0, 1, 8, 512, 50]
    assert AnyRows(101, 8).length(7) == 7
    # Halves, and one more or less, are of the batch in a way that is not known.
    for length in (50, 51, 100, 102, 202 - 1, 34, 152):
        with pytest.raises(UnclearLength, match="101 rows"):
            AnyRows(101, 8).length(length)


@pytest.mark.parametrize("row_bytes", [4, 602_112, 2**21])
def test_rows_to_trace_divide_nothing_else(row_bytes):
    rows = rows_to_trace({224, 3}, {64, 1021, 2 * 1019}, row_bytes)
    assert rows is not None and rows * row_bytes <= 2**28
    assert not any(length % rows == 0 for length in (224, 3, 64, 1021, 2038))
    assert all(rows % divisor for divisor in range(2, rows))


def test_batches_that_are_too_large_are_not_made_for_it():
    assert rows_to_trace({4096, 3}, set(), 2**23) is None


def test_weights_that_a_link_gathered_are_there_once_for_all_replicas():
    # Two replicas' weights, of 100 each, lie in the 100 that the link wrote in the step
    # before; it writes as many anew, and keeps both.
    stored = [StoredVariable(100, "weights")] * 2 + [StoredVariable(100, "exchange")]
    gathered = Op("EagerPyFunc", (), (), (100,), variable=2, access="read")
    assigns = [
        Op("AssignVariableOp", ((0, 0),), variable=place, access="assign")
        for place in (0, 1)
    ]
    ops = (gathered, *assigns)
    in_link_buffer = variables_in_link_buffers(ops, stored)
    assert in_link_buffer == {0: 2, 1: 2}
    graph = StepGraph(ops, tuple(stored), in_link_buffer=in_link_buffer)
    found = dry_run(graph, 1)
    assert found.peak_bytes == 200
    assert found.parts == {"weights": 100, "exchange": 100}
    # Of what a link has summed and others computed with nothing lies there.
    scaled = Op("Mul", ((0, 0),), (), (100,))
    assign = Op("AssignVariableOp", ((1, 0),), variable=0, access="assign")
    assert variables_in_link_buffers((gathered, scaled, assign), stored) == {}
