"""A manifest notices every way in which weights can arrive wrong; what is right passes, whatever its type,
order and buckets."""

import dataclasses
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.rl.weights import verification
from ptf.rl.weights.stored import into_buckets, write_buckets
from ptf.rl.weights.verification import Buckets, Manifest, SyncError, check, checksum, digest, manifest_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def tensors(count: int = 6, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"layers.{i}.weight", torch.randn(3, 4, generator=generator)) for i in range(count)]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=8),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_what_was_sent_is_accepted_in_any_order_and_any_buckets(shapes, limit, random):
    sent = [(f"t{i}", (torch.randn(shape) * 100).to(dtype)) for i, (dtype, shape) in enumerate(shapes)]
    digests: dict[str, str] = {}
    buckets = list(into_buckets(sent, digests, limit))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in sent]
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= limit for bucket in buckets)
    manifest = manifest_of(buckets, 4)
    assert digests == manifest.digests
    arrived = [(name, tensor.clone()) for name, tensor in sent]
    random.shuffle(arrived)
    receipt = check([arrived], manifest, current=3)
    assert (receipt.version, receipt.tensors) == (4, len(sent))


@given(st.integers(0, 11), st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_one_flipped_bit_is_noticed(element, bit):
    tensor = tensors(1)[0][1]
    changed = tensor.clone()
    changed.view(-1).view(torch.int32)[element] ^= -(2**31) if bit == 31 else 1 << bit
    assert digest(changed) != digest(tensor)


def words_of(data: bytes) -> list[int]:
    data += bytes(-len(data) % 8)
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]


@given(st.binary(max_size=200), st.integers(0, 7))
@settings(max_examples=80, deadline=None)
def test_a_checksum_is_its_formula_whatever_the_parts_and_the_place_in_memory(data, offset):
    expected = 0
    for i, word in enumerate(words_of(data)):
        mixed = (word ^ word >> 32) * 0xBF58476D1CE4E5B9 % 2**64
        expected += (mixed ^ mixed >> 29) * (2 * i + 1)
    held = torch.zeros(len(data) + offset, dtype=torch.uint8)
    held[offset:] = torch.tensor(list(data), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patched:
        for words in (1, 3, 1 << 15):
            verification._odd_numbers.cache_clear()
            patched.setitem(verification.WORDS, False, words)
            assert checksum(held[offset:]) == expected % 2**64
    verification._odd_numbers.cache_clear()


def test_a_digest_depends_on_type_and_shape_and_not_on_strides():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert digest(tensor) != digest(tensor.reshape(3, 2))
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, dtype=torch.int32))
    assert digest(tensor.T) == digest(tensor.T.contiguous())
    assert digest(torch.tensor(1.0)) != digest(torch.tensor([1.0]))


def dropped(buckets: Buckets) -> None:
    buckets[0].pop()


def doubled(buckets: Buckets) -> None:
    buckets[-1].append(buckets[0][0])


def swapped(buckets: Buckets) -> None:
    (a, x), (b, y) = buckets[0][:2]
    buckets[0][:2] = [(a, y), (b, x)]


def garbled(buckets: Buckets) -> None:
    buckets[0][0][1][0, 0] += 1e-7


def renamed(buckets: Buckets) -> None:
    buckets[0][0] = ("layers.9.weight", buckets[0][0][1])


def recast(buckets: Buckets) -> None:
    buckets[0][0] = (buckets[0][0][0], buckets[0][0][1].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (dropped, "did not arrive"),
        (doubled, "layers.0.weight arrived twice"),
        (swapped, "layers.0.weight arrived changed"),
        (garbled, "layers.0.weight arrived changed"),
        (renamed, "layers.9.weight was not announced"),
        (recast, "layers.0.weight arrived changed"),
    ],
)
def test_a_fault_is_refused_by_name(fault: Callable[[Buckets], None], said: str):
    buckets = list(into_buckets(tensors(), {}, 100))
    manifest = manifest_of(buckets, 1)
    check(buckets, manifest, current=0)
    fault(buckets)
    with pytest.raises(SyncError, match=f"weight sync 1 refused: .*{said}"):
        check(buckets, manifest, current=0)


@pytest.mark.parametrize(
    ("version", "held", "right"),
    [(1, 0, True), (1, 1, False), (2, 0, False), (0, 1, False), (0, -1, True), (7, -1, True)],
)
def test_versions_move_on_by_one_after_the_first_sync(version, held, right):
    buckets = [tensors()]
    manifest: Manifest = dataclasses.replace(manifest_of(buckets, 1), version=version)
    if right:
        assert check(buckets, manifest, held).version == version
    else:
        with pytest.raises(SyncError, match="a sync was lost"):
            check(buckets, manifest, held)


def test_many_faults_are_counted():
    buckets = [tensors(20)]
    manifest = manifest_of([tensors(20, seed=1)], 1)
    with pytest.raises(SyncError, match="and 15 more"):
        check(buckets, manifest, current=0)


def test_on_path_what_was_sent_arrives_and_the_version_before_stays(tmp_path):
    for version in (4, 5, 6):
        buckets, manifest = write_buckets(tensors(seed=version), tmp_path, version, limit=100)
        assert len(buckets) == 3
        assert check(buckets, manifest, current=version - 1).tensors == 6
        assert {place.name for place in tmp_path.iterdir()} == {str(v) for v in (version - 1, version) if v >= 4}


def test_on_path_no_more_than_a_bucket_is_in_memory(tmp_path):
    alive, most = weakref.WeakSet(), 0

    def made():
        nonlocal most
        for i in range(40):
            tensor = torch.full((256,), float(i))
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"t{i}", tensor
            del tensor

    buckets, _ = write_buckets(made(), tmp_path, 0, limit=4 * 1024)
    assert len(buckets) == 10
    assert most <= 6  # a bucket, the one that opens the next, and the one that is being made


@pytest.mark.parametrize("fault", ["gone", "cut", "bit", "of another version"])
def test_on_path_a_file_that_is_not_as_it_was_written_is_refused(tmp_path, fault):
    write_buckets(tensors(seed=1), tmp_path, 4, limit=100)
    buckets, manifest = write_buckets(tensors(), tmp_path, 5, limit=100)
    file = buckets.files[1]
    data = bytearray(file.read_bytes())
    if fault == "gone":
        file.unlink()
    elif fault == "cut":
        file.write_bytes(data[:-3])
    elif fault == "bit":
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        file.write_bytes((tmp_path / "4" / file.name).read_bytes())
    with pytest.raises(SyncError, match=r"cannot be read|arrived changed"):
        check(buckets, manifest, current=4)
