import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepretrain.data import order
from sparsepretrain.data.order import windows
from support.token_cases import token_data


def data(count: int, held_out: int = 0):
    return token_data({"train": np.arange(count), "validation": np.arange(held_out)})


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(1, 120), st.integers(0, 2**63 - 1), st.integers(1, 13))
def test_an_epoch_visits_every_place_once(length, extra, seed, size):
    train = windows(data(length + extra), "train", length, seed)
    steps = -(-2 * train.count // size)
    batches = np.concatenate([train.batch(s, range(size), size) for s in range(steps)])
    assert batches.dtype == np.int64 and batches.shape == (steps * size, length + 1)
    assert (np.diff(batches, axis=1) == 1).all()  # contiguous text
    for epoch in range(2):
        starts = np.sort(batches[epoch * train.count : (epoch + 1) * train.count, 0])
        assert (np.diff(starts) == length).all()
        assert 0 <= starts[0] < length and starts[-1] + length < length + extra


@settings(max_examples=60, deadline=None)
@given(step=st.integers(0, 50), size=st.integers(1, 16), pick=st.data())
def test_order_is_a_pure_function_of_seed_step_position(step, size, pick):
    train = windows(data(200), "train", 4, 3)
    whole = train.batch(step, range(size), size)
    positions = pick.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    fresh = windows(data(200), "train", 4, 3)
    assert (fresh.batch(step, np.array(positions), size) == whole[positions]).all()
    # the sample at place g of the stream does not depend on the batch size
    g = step * size
    assert (fresh.batch(g, [0], 1)[0] == whole[0]).all()


def test_seeds_and_epochs_differ_in_permutation_and_offset():
    train = windows(data(4001), "train", 8, 0)
    first, second = (train.batch(e, range(train.count), train.count)[:, 0] for e in range(2))
    other = windows(data(4001), "train", 8, 1).batch(0, range(train.count), train.count)[:, 0]
    assert not (first // 8 == second // 8).all() and not (first == other).all()
    offsets = {int(train.batch(e, range(train.count), train.count)[:, 0].min()) for e in range(60)}
    assert offsets == set(range(8))


def test_windows_with_replacement_start_anywhere():
    tokens, length = data(60), 5
    drawn = windows(tokens, "train", length, 3, replacement=True)
    rows = np.concatenate([drawn.batch(step, range(8), 8) for step in range(100)])
    assert (np.diff(rows, axis=1) == 1).all() and rows.min() == 0 and rows.max() == 59
    counts = np.bincount(rows[:, 0], minlength=55)
    # 800 draws from 55 places, 14.5 each: 54 ± 10.4 if they are uniform
    assert len(counts) == 55 and ((counts - 800 / 55) ** 2 / (800 / 55)).sum() < 54 + 5 * 10.4
    starts = rows[: drawn.count, 0]
    assert len(set(starts)) < len(starts), "a permutation would repeat nothing"
    again = windows(tokens, "train", length, 3, replacement=True)
    assert (again.batch(40, [2, 7], 8) == rows[[322, 327]]).all()


def test_order_equals_the_golden_order():
    """Fixed for ever: a change here changes every run and breaks resuming."""
    train = windows(data(50), "train", 5, 42)
    assert train.count == 9
    assert [train.batch(step, range(4), 4)[:, 0].tolist() for step in range(5)] == [
        [31, 1, 26, 16], [11, 21, 41, 6], [36, 19, 44, 24], [14, 9, 34, 4], [29, 39, 40, 25],
    ]  # fmt: skip


def test_text_of_one_sequence_suffices():
    train = windows(data(6), "train", 5, 0)
    assert train.count == 1 and train.batch(7, [0, 1], 2).tolist() == [[0, 1, 2, 3, 4, 5]] * 2


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 99), st.integers(1, 13))
def test_complete_evaluation_predicts_every_token_once(length, extra, seed, size):
    """But the first; and it begins with the windows of an ordinary epoch."""
    tokens = data(1, length + extra)
    held_out = windows(tokens, "validation", length, seed, complete=True)
    places = range(held_out.count)
    parts = [held_out.batch(0, places[i : i + size], held_out.count) for i in places[::size]]
    rows = np.concatenate(parts)
    assert rows.shape == (held_out.count, length + 1) and rows.dtype == np.int64
    targets = rows[:, 1:]
    assert sorted(targets[targets >= 0]) == list(range(1, length + extra))
    for row in rows:
        text = row[row >= 0]
        assert len(text) > 1 and (np.diff(text) == 1).all() and (row[len(text) :] == -1).all()
    ordinary = windows(tokens, "validation", length, seed)
    assert (rows[: ordinary.count] == ordinary.batch(0, range(ordinary.count), 1)).all()
    assert held_out.count - ordinary.count <= 3
    assert (held_out.batch(1, [0], held_out.count) == rows[:1]).all(), "every pass is the same"


def documents(lengths, length, seed=0):
    """Documents of increasing tokens, each ended by 0, with the order of ``windows``."""
    tokens = np.concatenate([np.r_[np.arange(1, n), 0] for n in lengths])
    opened = token_data({"train": tokens}, end=0)
    return windows(opened, "train", length, seed, documents=True)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=20),
    length=st.integers(2, 9),
    seed=st.integers(0, 2**63 - 1),
)
def test_an_epoch_visits_the_beginning_of_every_document_once(lengths, length, seed):
    found = documents(lengths, length, seed)
    assert found.count == len(lengths)
    rows = found.batch(1, range(found.count), found.count)
    assert rows.shape == (len(lengths), length + 1) and (rows[:, -1] == -1).all()
    sizes = []
    for row in rows:
        kept = row[row >= 0]
        sizes.append(len(kept))
        ends = kept[-1] == 0
        assert list(kept) == [*range(1, len(kept) + 1 - ends), *[0] * int(ends)]
    assert sorted(sizes) == sorted(min(n, length) for n in lengths)


def test_documents_without_a_token_to_predict_are_left_out():
    assert documents([1, 5, 1, 1, 2], 8).count == 2
    opened = token_data({"train": [0, 0, 3, 4]}, end=0)  # the last document has no end
    rows = windows(opened, "train", 4, 0, documents=True).batch(0, [0], 1)
    assert rows.tolist() == [[3, 4, -1, -1, -1]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_documents_are_the_same_however_many_bounds_are_read_at_a_time(monkeypatch, chunk):
    monkeypatch.setattr(order, "CHUNK", chunk)
    lengths = [1, 1, 4, 2, 1, 6, 3, 1]
    found = documents(lengths, 9)
    rows = found.batch(0, range(found.count), found.count)
    assert sorted((rows >= 0).sum(1)) == [2, 3, 4, 6]
