"""Samples as a function of the seed and the global sample number."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from penstock.errors import DataError
from penstock.train.data.corpus import Corpus
from penstock.train.data.window_sampler import WindowMicrobatches, Windows, batches, shuffled


def windows(tokens=10_000, context=10, held_out=0.1, seed=0):
    return Windows(Corpus("test", np.arange(tokens), tokens, text=False), context, held_out, seed)


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 3))
def test_shuffled_is_a_permutation(count, seed, epoch):
    assert sorted(shuffled(k, count, seed, epoch) for k in range(count)) == list(range(count))


def test_large_seeds_count_in_full():
    orders = {tuple(shuffled(k, 100, seed, 0) for k in range(100)) for seed in (1, 1 + 2**32, 1 + 2**40, 2**63 - 1)}
    assert len(orders) == 4


def test_every_window_is_seen_once_per_epoch_in_a_new_order():
    data = windows(2_000)
    n = len(data.training)
    first, second = (data.samples(n * epoch, n)[0][:, 0].tolist() for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == [10 * w for w in data.training]
    assert windows(2_000, seed=1).samples(0, n)[0][:, 0].tolist() != first


def test_targets_are_the_next_tokens():
    inputs, targets = windows().samples(3, 5)
    assert inputs.shape == targets.shape == (5, 10)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_validation_windows_are_apart_and_of_the_asked_share():
    data = windows(100_000)
    assert not set(data.training) & set(data.validation)
    assert len(data.training) + len(data.validation) == data.count
    assert len(data.validation) / data.count == pytest.approx(0.1, rel=0.15)
    seen = set((data.validation_samples(0, len(data.validation))[0][:, 0] // 10).tolist())
    assert seen == set(data.validation)


def test_a_sample_does_not_depend_on_how_it_is_asked_for():
    """Any cut into microbatches, on any rank, finds the same samples."""
    data = windows()
    alone = torch.stack([data.samples(k, 1)[0][0] for k in range(24)])
    by_batch = [WindowMicrobatches(data, t * 12, 3, 4) for t in range(2)]
    joined = torch.cat([x for batch in by_batch for x, _ in (batch[k] for k in range(3))])
    assert torch.equal(alone, joined)
    assert torch.equal(alone, data.samples(0, 24)[0])


def test_batches_are_sequences_of_m_pairs():
    made = list(batches(windows(), 16, 3, microbatches=4, size=2))
    assert [len(batch) for batch in made] == [4, 4, 4]
    assert torch.equal(made[0][1][0], windows().samples((2 * 4 + 1) * 2, 2)[0])
    with pytest.raises(IndexError):
        made[0][4]


def test_short_text_is_refused_with_the_numbers():
    with pytest.raises(DataError, match="has 20 tokens; with model.context 10 at least 21 are needed"):
        windows(20)
    tiny = windows(21)
    assert len(tiny.training) == len(tiny.validation) == 1


@given(st.integers(21, 3000), st.floats(0.01, 0.5))
def test_there_is_always_something_to_train_and_to_validate_on(tokens, held_out):
    data = windows(tokens, held_out=held_out)
    assert len(data.training)
    assert len(data.validation)


def test_tokens_are_counted_where_they_are(monkeypatch):
    """Training and held-out text apart, in parts, every token of a window once."""
    monkeypatch.setattr("penstock.train.data.window_sampler._PART", 7)
    tokens = np.random.default_rng(0).integers(0, 11, 1003)
    windows = Windows(Corpus("numbers", tokens, 11, text=False), 10, 0.1, seed=0)
    train, held_out = windows.count_tokens(11)
    rows = tokens[:1000].reshape(100, 10)
    assert train.tolist() == np.bincount(rows[windows.training].ravel(), minlength=11).tolist()
    assert held_out.tolist() == np.bincount(rows[windows.validation].ravel(), minlength=11).tolist()


def test_of_a_large_text_some_windows_are_counted_of_either_kind(monkeypatch):
    """Held-out windows are few and lie together; none of them must be missed because of that."""
    monkeypatch.setattr("penstock.train.data.window_sampler._COUNTED", 1000)
    tokens = np.random.default_rng(0).integers(0, 11, 100_001)
    windows = Windows(Corpus("numbers", tokens, 11, text=False), 10, 0.004, seed=0)
    train, held_out = windows.count_tokens(11)
    assert len(windows.validation) * 10 < 1000 <= train.sum() < 2000
    assert held_out.sum() == len(windows.validation) * 10
