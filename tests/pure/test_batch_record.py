"""Checksums of batches: hosts that have read ahead by different numbers agree."""

from tfdp.data.same_batches import BatchRecord, common_ends, first_differences


def record_of(*passes):
    record = BatchRecord()
    for iterator, checksums in enumerate(passes):
        for checksum in checksums:
            record.note(iterator, checksum)
    return record


def test_what_steps_have_taken_is_told_and_no_more():
    record = record_of("abcde", "fg")
    assert record.told([3]) == {0: (0, ["a", "b", "c"])}
    # Keras counts whole executions, of which the last may be shorter.
    assert record.told([8, 1]) == {0: (0, [*"abcde"]), 1: (0, ["f"])}
    assert record.told(None) == {0: (0, [*"abcde"]), 1: (0, [*"fg"])}


def test_what_was_compared_is_told_no_more():
    record = record_of("abcde")
    record.forget({0: 3})
    assert record.told([4]) == {0: (3, ["d"])}
    assert record.told([3]) == {}


def test_hosts_that_have_read_ahead_compare_what_all_have():
    """What is left of one is compared at the next end of a loop."""
    ahead, behind = record_of("abcde"), record_of("abc")
    told = [record.told(None) for record in (ahead, behind)]
    ahead.forget({0: 5})
    behind.forget({0: 3})
    assert first_differences(told) == {}
    ahead.keep(told[0], common_ends(told))
    behind.keep(told[1], common_ends(told))
    for checksum in "xy":
        behind.note(0, checksum)
    told = [record.told(None) for record in (ahead, behind)]
    assert told == [{0: (3, ["d", "e"])}, {0: (3, ["x", "y"])}]
    assert first_differences(told) == {1: (0, 3)}


def test_the_first_difference_of_each_host_is_found():
    told = [record_of(*passes).told(None) for passes in (("ab", "cd"),) * 2]
    told.append(record_of("ab", "cx").told(None))
    assert first_differences(told) == {2: (1, 1)}
