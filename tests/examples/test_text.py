"""The data: the same bytes for torch, for JAX and after a restart."""

import numpy as np
import pytest

from tests.examples.conftest import examples_importable

with examples_importable():
    import text as examples_text


@pytest.fixture
def letters(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_bytes(bytes(range(250)) * 40)
    return path


def test_the_standard_library_is_on_every_machine():
    text = examples_text.load(context=64)
    assert 2e6 < len(text.train) < 4.5e6
    assert 1e5 < len(text.validation) < len(text.train)
    assert b"import" in text.train.tobytes()
    # Held out by whole files: no stretch of it stands in what is trained on.
    held_out = text.validation.tobytes()
    train = text.train.tobytes()
    assert not any(held_out[i : i + 400] in train for i in range(1000, len(held_out) - 400, 40_000))


def test_one_file_is_split_at_its_last_tenth(letters):
    text = examples_text.load(letters, context=8)
    assert text.train.tobytes() + text.validation.tobytes() == letters.read_bytes()
    assert len(text.validation) == 1000


def test_a_batch_depends_on_seed_step_and_replica_alone(letters):
    first, again = (examples_text.load(letters, context=8) for _ in range(2))
    batch = first.batch(1, 2, 3, size=16, context=8)
    np.testing.assert_array_equal(batch, again.batch(1, 2, 3, size=16, context=8))
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not np.array_equal(batch, first.batch(*other, size=16, context=8))


def test_targets_are_the_next_bytes(letters):
    inputs, targets = examples_text.load(letters, context=8).batch(0, 0, 0, size=16, context=8)
    assert inputs.shape == targets.shape == (16, 8)
    np.testing.assert_array_equal(targets, (inputs + 1) % 250)


def test_windows_reach_the_last_byte():
    text = examples_text.Text(np.arange(10, dtype=np.uint8), np.arange(10, dtype=np.uint8))
    seen = np.concatenate([text.batch(0, step, 0, size=8, context=4)[1] for step in range(20)])
    assert seen.max() == 9
    assert seen.min() == 1
    assert text.validation_batch(0, 1, windows=3, context=4)[1][-1, -1] == 9


def test_replicas_share_the_held_out_windows(letters):
    text = examples_text.load(letters, context=8)
    (whole, _), *shares = [text.validation_batch(0, 1, 12, 8), *(text.validation_batch(i, 3, 12, 8) for i in range(3))]
    parts = np.concatenate([inputs for inputs, _ in shares])
    np.testing.assert_array_equal(np.sort(whole, axis=0), np.sort(parts, axis=0))


def test_too_little_text_is_refused_by_name(tmp_path):
    with pytest.raises(SystemExit, match=r"absent\.txt: No such file"):
        examples_text.load(tmp_path / "absent.txt", context=8)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(SystemExit, match=r"short\.txt is too short: 8 bytes to train on and 1 held out"):
        examples_text.load(short, context=8)
