"""Two exchanges never share the number by which TensorFlow finds partners."""

from tfdp.exchange.over_collectives import KEYS, CollectiveKeys, first_choice

# Found by trying 130,000 of them.
SAME_CHOICE = ("193 873842 float32", "99 1544612 float32")


def test_those_that_fall_on_one_number_get_two():
    first, second = SAME_CHOICE
    assert first_choice(first) == first_choice(second)
    hosts = [CollectiveKeys() for _ in range(2)]
    # Asked for again and again, as hosts that trace anew do.
    asked = [[first, second, first], [first, first, second, second]]
    numbers = [
        {exchange: keys.key_of(exchange) for exchange in order}
        for keys, order in zip(hosts, asked, strict=True)
    ]
    assert numbers[0] == numbers[1]
    assert numbers[0][first] != numbers[0][second]
    assert numbers[0][first] == first_choice(first)


def test_a_number_does_not_follow_from_the_order():
    exchanges = [f"{place} {256 * place} float32" for place in range(1000)]
    ahead, back = CollectiveKeys(), CollectiveKeys()
    numbers = [ahead.key_of(exchange) for exchange in exchanges]
    assert [back.key_of(exchange) for exchange in exchanges[::-1]] == numbers[::-1]
    assert len(set(numbers)) == 1000
    assert all(0 <= number < KEYS for number in numbers)


def test_the_last_number_is_followed_by_the_first(monkeypatch):
    from tfdp.exchange import over_collectives

    monkeypatch.setattr(over_collectives, "first_choice", lambda exchange: KEYS - 1)
    keys = CollectiveKeys()
    assert [keys.key_of(exchange) for exchange in "abca"] == [KEYS - 1, 0, 1, KEYS - 1]
