"""Buckets of sentence pairs: who is in which, when."""

import numpy as np
import pytest

from sparsepretrain.data.formats import Pairs, pairs
from sparsepretrain.data.order import Buckets
from sparsepretrain.errors import DataError
from support.token_cases import token_data


@pytest.fixture(scope="module")
def lengths():
    return np.random.default_rng(0).integers(2, 60, (997, 2))


def padded(lengths):
    return -(-lengths // 4) * 4


def members(buckets, epoch):
    return [buckets.pairs(epoch * buckets.count + i).tolist() for i in range(buckets.count)]


@pytest.mark.parametrize("max_tokens", [60, 256, 4096, 10**6])
def test_every_pair_comes_once_per_epoch_within_the_budget(lengths, max_tokens):
    buckets = Buckets(lengths, max_tokens, seed=3)
    for epoch in (0, 1, 7):
        got = members(buckets, epoch)
        assert sorted(np.concatenate(got)) == list(range(997))
        for rows in got:
            size = len(rows) * padded(lengths[rows]).max()
            assert size <= max_tokens and size <= buckets.capacity


def test_buckets_have_no_room_for_another_pair(lengths):
    """One more pair of the next bucket would not have fitted."""
    buckets = Buckets(lengths, 512, seed=0)
    longest = np.sort(padded(lengths).max(axis=1))
    for begin, end in zip(buckets.starts[:-2], buckets.starts[1:-1], strict=True):
        assert (end - begin + 1) * longest[end] > 512


def test_the_order_is_a_pure_function(lengths):
    one, two = (Buckets(lengths, 512, seed=5) for _ in range(2))
    samples = [i * 37 % (3 * one.count) for i in range(2 * one.count)]
    there = {sample: one.pairs(sample).tolist() for sample in samples}
    assert all(two.pairs(sample).tolist() == there[sample] for sample in sorted(samples))
    assert members(Buckets(lengths, 512, seed=6), 0) != members(one, 0)


def test_epochs_shuffle_equal_lengths_and_keep_bucket_shapes(lengths):
    buckets = Buckets(lengths % 9 + 2, 256, seed=0)
    shapes = [sorted(len(rows) for rows in members(buckets, epoch)) for epoch in range(3)]
    assert shapes[0] == shapes[1] == shapes[2]
    first, second = ({frozenset(rows) for rows in members(buckets, e)} for e in (0, 1))
    assert not first & second, "ties are broken anew"
    order = [len(rows) for rows in members(buckets, 0)]
    assert order != sorted(order) and order != [len(rows) for rows in members(buckets, 1)]


def test_pair_longer_than_the_budget_has_its_own_bucket():
    buckets = Buckets(np.array([[90, 3], [5, 6], [7, 8], [2, 80]]), 64, seed=0)
    assert sorted(map(sorted, members(buckets, 0))) == [[0], [1, 2], [3]]


def stream(tmp_path, tokens, end=0):
    return token_data({"train": np.array(tokens, dtype=np.uint16)}, end, tmp_path, 300)


def test_pairs_of_a_token_stream(tmp_path):
    found = pairs(stream(tmp_path, [5, 6, 0, 7, 0, 8, 0, 9, 10, 11, 0]), "train")
    assert isinstance(found, Pairs) and len(found) == 2
    assert found.lengths.tolist() == [[3, 2], [2, 4]]
    assert [found.source(i).tolist() for i in range(2)] == [[5, 6, 0], [8, 0]]
    assert [found.target(i).tolist() for i in range(2)] == [[7, 0], [9, 10, 11, 0]]


@pytest.mark.parametrize(
    ("tokens", "split", "end", "message"),
    [
        *((odd, "train", 0, "not hold pairs") for odd in ([5, 0], [5, 0, 6], [5, 0, 6, 0, 7])),
        ([], "train", 0, "'train'"),
        ([5, 0, 6, 0], "test", 0, "data.test"),
        ([5, 0, 6, 0], "train", None, "no token"),
    ],
)
def test_unpaired_documents_are_refused(tmp_path, tokens, split, end, message):
    with pytest.raises(DataError, match=message):
        pairs(stream(tmp_path, tokens, end), split)
