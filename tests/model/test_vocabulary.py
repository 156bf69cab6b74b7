"""Rows of the vocabulary: those that only fill up a tile never count, never move and never leave;
those of new tokens begin as they are told."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ptf.config.sections.compute import MeshSizes
from ptf.errors import UserError
from ptf.model import bridge, model_files, model_writer
from ptf.model.checkpoint_mapping import PaddedRows
from ptf.model.chunked import cross_entropy
from ptf.model.decoder import Decoder
from ptf.model.families import family_of
from ptf.model.head import Head
from ptf.model.reference import random_reference
from ptf.model.sharding import parallelize
from ptf.model.vocabulary import NewRows, extend, read_vectors, rows
from tests.model.ranks import two_ranks, world_of
from tests.tiny import packed

FAMILIES = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "gemma3")
VOCAB = 131  # 3 rows of 64 tokens: the last has 3 real ones


def checkpoint(model_type: str, directory: Path, tied: bool | None = None) -> Path:
    config = family_of({"model_type": model_type}).random_config(random.Random(4))
    text = config.get("text_config", config)
    text["vocab_size"] = VOCAB
    if tied is not None:
        text["tie_word_embeddings"] = tied
    random_reference(config, 4).save_pretrained(directory)
    return directory


def model_of(directory: Path) -> Decoder:
    return bridge.load(directory)


def loss_of(model: Decoder, batch, head=lambda h: h) -> torch.Tensor:
    return model(
        batch.tokens,
        batch.positions,
        batch.segments,
        lambda x, h: cross_entropy(x, head(h), batch.targets, batch.loss_weights),
    )


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("drawn", [False, True])
def test_padding_rows_are_zero_and_stay_zero(tmp_path, model_type, drawn):
    model = model_of(checkpoint(model_type, tmp_path / "m"))
    if drawn:
        model.give_weights(tmp_path / "m", torch.device("cpu"), random=True, seed=1)
    tables = {id(p): p for p in (model.embed.weight, model.head.weight)}.values()
    assert all(len(p) == 192 for p in tables)
    assert all((p[VOCAB:] == 0).all() and (p[:VOCAB] != 0).any(-1).all() for p in tables)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    before = [p.detach().clone() for p in tables]
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, packed([[20, 30]], 64)).backward()
        assert all((p.grad[VOCAB:] == 0).all() for p in tables)
        optimizer.step()
    assert all((p[VOCAB:] == 0).all() for p in tables)
    assert not any(torch.equal(a, b) for a, b in zip(before, tables, strict=True))
    logits = model(
        *(getattr(packed([[9]], 9), n) for n in ("tokens", "positions", "segments")), lambda x, head: head.logits(x)
    )
    assert logits.shape[-1] == VOCAB  # what samplers draw from


def test_unmasked_padding_is_noticed(tmp_path):
    """Negative control: a head that takes its padding for tokens gives it a gradient and another loss."""
    model, batch = model_of(checkpoint("qwen3", tmp_path / "m")), packed([[20, 30]], 64)
    right = loss_of(model, batch)
    wrong = loss_of(model, batch, lambda h: Head(h.weight, 192, h.softcap))
    wrong.backward()
    assert abs(float((wrong - right).detach())) > 1e-2
    assert (model.head.weight.grad[VOCAB:] != 0).any()


@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 200))
def test_any_slice_of_a_padded_table_is_read_from_the_shorter_one(count, a, b):
    first, last = sorted((min(a, count + 50), min(b, count + 50)))
    stored = torch.arange(1.0, count * 3 + 1).view(count, 3)
    whole = torch.cat((stored, torch.zeros(50, 3)))

    def read(name, part):
        assert 0 <= part[0].start < part[0].stop <= count, "beyond what is stored"
        return stored[part]

    part = (slice(first, last), slice(1, 3))
    assert torch.equal(PaddedRows(("ours",), "theirs", count).read(0, part, read), whole[part])


def _sharded(directory: Path, out: Path, drawn: bool) -> dict:
    model = bridge.build(directory)
    parallelize(model, world_of(MeshSizes(shard=2)).meshes, "fp32")
    model.give_weights(directory, torch.device("cpu"), random=drawn, seed=3)
    rank = torch.distributed.get_rank()
    model_writer.save_hf(model.hf_tensors(), directory, out, writes=rank == 0)
    return {"local": model.embed.weight.to_local().clone()}


@pytest.mark.long
@pytest.mark.parametrize("vocab", [131, 50])  # rank 1 holds some padding; nothing but padding
def test_a_sharded_model_reads_and_writes_only_real_rows(tmp_path, vocab):
    config = family_of({"model_type": "qwen3"}).random_config(random.Random(4)) | {
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    random_reference(config, 4).save_pretrained(tmp_path / "m")
    found = two_ranks(partial(_sharded, tmp_path / "m", tmp_path / "out", False), tmp_path)
    stored, back = load_file(tmp_path / "m" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == back.keys()
    assert all(torch.equal(stored[n], back[n]) for n in stored)
    whole = torch.cat([f["local"] for f in found])
    assert torch.equal(whole[:vocab], stored["model.embed_tokens.weight"])
    assert (whole[vocab:] == 0).all()
    assert len(whole) % 64 == 0


@pytest.mark.long
def test_random_rows_do_not_depend_on_sharding_or_padding(tmp_path):
    directory = checkpoint("qwen3", tmp_path / "m", tied=False)
    found = two_ranks(partial(_sharded, directory, tmp_path / "out", True), tmp_path)
    model = model_of(directory)
    model.give_weights(directory, torch.device("cpu"), random=True, seed=3)
    assert torch.equal(torch.cat([f["local"] for f in found]), model.embed.weight)


# New tokens


def tables_of(directory: Path) -> dict[str, torch.Tensor]:
    """`embed` and, where it is not tied, `head`."""
    model = model_of(directory)
    c = model.config
    return {
        n: p.detach()[: c.vocab]
        for n, p in (("embed", model.embed.weight), ("head", model.head.weight))
        if n == "embed" or not c.tied
    }


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("policy", ["mean", "description", "vectors"])
@pytest.mark.parametrize("known", [VOCAB, 120])  # every row is in use; some are not, and serve first
def test_rows_of_new_tokens_begin_as_they_are_told(tmp_path, model_type, policy, known):
    directory = checkpoint(model_type, tmp_path / "m")
    old = tables_of(directory)
    ids, pieces = list(range(known, known + 20)), [[i, 3, 3 * i] for i in range(20)]
    vectors = {n: torch.randn(20, t.shape[1], generator=torch.Generator().manual_seed(1)) for n, t in old.items()}
    new = NewRows(ids, known, pieces if policy == "description" else None, vectors if policy == "vectors" else None)
    extend(directory, tmp_path / "out", str(directory), new, bridge.build(directory))
    vocab = max(VOCAB, known + 20)
    assert rows(model_files.read_config(tmp_path / "out")) == vocab
    expected = {
        "mean": {n: t[:known].mean(0).expand(20, -1) for n, t in old.items()},
        "description": {n: torch.stack([t[p].mean(0) for p in pieces]) for n, t in old.items()},
        "vectors": vectors,
    }[policy]
    for name, table in tables_of(tmp_path / "out").items():
        assert len(table) == vocab
        assert torch.allclose(table[known : known + 20], expected[name], atol=1e-7)
        untouched = [i for i in range(VOCAB) if i not in ids]
        assert torch.equal(table[untouched], old[name][untouched])
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {n for n in after if len(after[n]) != len(before.get(n, after[n]))} <= {
        n for n in after if "embed_tokens" in n or "lm_head" in n
    }


def test_the_extended_model_is_what_transformers_makes_of_it(tmp_path):
    """Old tokens have the logits they had; transformers' own resizing to the mean gives the same for new ones."""
    directory = checkpoint("qwen3", tmp_path / "m", tied=False)
    new = NewRows(range(VOCAB, VOCAB + 9), VOCAB)
    extend(directory, tmp_path / "out", str(directory), new, bridge.build(directory))
    ids = torch.randint(0, VOCAB, (1, 30), generator=torch.Generator().manual_seed(0))
    before = AutoModelForCausalLM.from_pretrained(directory)(ids).logits
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    assert after.shape[-1] == VOCAB + 9
    assert torch.allclose(after[..., :VOCAB], before, atol=1e-5)
    assert torch.allclose(after[..., VOCAB:], before.mean(-1, keepdim=True).expand(-1, -1, 9), atol=1e-5)


def test_vectors_of_another_shape_are_refused(tmp_path):
    save_file({"embed": torch.zeros(4, 8)}, tmp_path / "v.safetensors")
    assert read_vectors(str(tmp_path / "v.safetensors"), 4, 8, tied=True).keys() == {"embed"}
    with pytest.raises(UserError, match=r"embed is \(4, 8\)"):
        read_vectors(str(tmp_path / "v.safetensors"), 5, 8, tied=True)
    save_file({"embed": torch.zeros(4, 8), "head": torch.zeros(4, 8)}, tmp_path / "h.safetensors")
    assert read_vectors(str(tmp_path / "h.safetensors"), 4, 8, tied=False).keys() == {"embed", "head"}
    with pytest.raises(UserError, match="must hold `embed`, "):
        read_vectors(str(tmp_path / "h.safetensors"), 4, 8, tied=True)
    (tmp_path / "x.safetensors").write_text("x")
    with pytest.raises(UserError, match="cannot be read"):
        read_vectors(str(tmp_path / "x.safetensors"), 4, 8, tied=True)
