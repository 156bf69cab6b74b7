"""`model.backend: hf`: what transformers computes and stores, behind Decoder's interface."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from ptf.compute.tracking import read_metrics
from ptf.compute.world import World
from ptf.config import ConfigError, loads
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.batch import Batch
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import hf_backend, hf_checks, model_files, model_writer
from ptf.model.reference import export_difference
from ptf.recipes.sft.recipe import SFT
from ptf.run import run
from ptf.train.trainer import Trainer, load_model
from tests.model.foreign import CONFIGS, foreign
from tests.model.ranks import two_ranks, world_of
from tests.model.wrappers import wrapper
from tests.recipes.of_keys import of_keys
from tests.tiny import arithmetic, checkpoint, packed

SPEC = ModelConfig(path="-", backend="hf")
BATCHES = [
    packed([[9, 14], [20, 3, 1]], 30, seed=1),
    packed([[25], [7, 7, 7]], 30, seed=2),
    packed([[11, 12], [2, 2]], 30, seed=3),
]
TRAIN = TrainConfig(steps=3, lr=1e-2, schedule="constant", weight_decay=0.1, max_grad_norm=1.0, precision="fp32")


# AdamW would make a whole step of the rounding in a gradient that is 0, such as a key bias's
DAMPED = TRAIN.model_copy(update={"eps": 1e-3})


def loaded(directory: Path, world: World | None = None):
    return load_model(directory, world or World(), SPEC, seed=0, precision="fp32")


def plain_loss(model, batch: Batch) -> torch.Tensor:
    """The summed loss, a document at a time, as anybody would write it with transformers."""
    total = torch.zeros(())
    for document in batch.segments.unique().tolist():
        if document >= 0:
            at = batch.segments == document
            logits = model(input_ids=batch.tokens[at][None]).logits[0].float()
            total = (
                total + (F.cross_entropy(logits, batch.targets[at], reduction="none") * batch.loss_weights[at]).sum()
            )
    return total


def plain_training(directory: Path) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and gradient norm of each step, and the gradients of the first."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=TRAIN.betas, eps=TRAIN.eps)
    seen, first = [], {}
    for batch in BATCHES:
        loss = plain_loss(model, batch) / batch.loss_weights.sum()
        loss.backward()
        first = first or {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen, first


@pytest.mark.parametrize("model_type", CONFIGS)
def test_loss_gradients_and_steps_are_those_of_plain_transformers(model_type, tmp_path):
    directory = foreign(tmp_path / "m", model_type)
    model = loaded(directory)
    expected, first = plain_training(directory)
    loss, _ = of_keys(SFT).loss(model, BATCHES[0], {})
    (loss / BATCHES[0].loss_weights.sum()).backward()
    scale = max(g.abs().max() for g in first.values())
    for name, p in model.hf.named_parameters():
        assert (p.grad - first[name]).abs().max() <= 1e-5 * scale, name
        p.grad = None
    trainer = Trainer(model, World(), TRAIN)
    for step, (batch, (loss, norm)) in enumerate(zip(BATCHES, expected, strict=True)):
        metrics = trainer.step([batch], of_keys(SFT), step)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert expected[0][0] != pytest.approx(expected[2][0], rel=1e-3)  # control: the weights moved


@pytest.mark.parametrize("model_type", CONFIGS)
def test_documents_of_a_row_do_not_see_each_other(model_type, tmp_path):
    model = loaded(foreign(tmp_path / "m", model_type))
    batch = packed([[9, 14, 7]], 32)
    seen: list[torch.Tensor] = []

    def remember(module, args, output):
        output.retain_grad()
        seen.append(output)

    model.hf.get_input_embeddings().register_forward_hook(remember)
    hidden = model(batch.tokens, batch.positions, batch.segments, lambda x, head: x)
    (
        hidden
        * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        * (batch.segments == 1)[..., None]
    ).sum().backward()
    by_document = [g.abs().max().item() for g in seen[0].grad]
    assert by_document[0] == by_document[2] == 0.0
    assert by_document[1] > 0
    tokens = torch.where(batch.segments == 1, batch.tokens, (batch.tokens + 1) % 97)
    again = model(tokens, batch.positions, batch.segments, lambda x, head: x)
    own = batch.segments == 1
    bound = 1e-6 if model_type == "mixtral" else 0.0  # its experts sum over all rows' tokens at once
    assert (again - hidden)[own].abs().max() <= bound
    assert (again - hidden)[batch.segments == 0].abs().max() > 1e-3  # control


@torch.no_grad()
def test_longrope_changes_its_frequencies_and_changes_them_back(tmp_path):
    """Its two buffers are one tensor in transformers' model: the second one was not copied, and held no value."""
    directory = foreign(tmp_path / "m", "phi3")
    model = loaded(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logits(lengths: list[int]) -> torch.Tensor:
        batch = packed([lengths], 80)
        return model(batch.tokens, batch.positions, batch.segments, lambda x, head: head.logits(x))[0, : lengths[0]]

    for length in (20, 60, 20):
        tokens = packed([[length]], 80).tokens[:, :length]
        assert torch.allclose(logits([length]), reference(input_ids=tokens).logits[0], atol=1e-5)
    with pytest.raises(UserError, match=r"of at most 32 tokens if their batch has a longer one \(here 60\)"):
        logits([60, 10])
    logits([20, 10]), logits([40, 35]), logits([60, 1])


@pytest.mark.parametrize("model_type", CONFIGS)
@torch.no_grad()
def test_the_assembled_model_has_every_tensor_of_transformers(model_type, tmp_path):
    directory = foreign(tmp_path / "m", model_type)
    model = loaded(directory)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    theirs = dict(whole.named_parameters()) | dict(whole.named_buffers(remove_duplicate=False))
    mine = dict(model.hf.named_parameters()) | dict(model.hf.named_buffers(remove_duplicate=False))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_state_that_has_other_values_is_refused(tmp_path):
    model = loaded(foreign(tmp_path / "m", "phi3"))
    hf_checks.check(model)  # control
    model.hf.model.rotary_emb.inv_freq = model.hf.model.rotary_emb.inv_freq * 1.01
    with pytest.raises(UserError, match=r"phi3 was not assembled .* other values: model.rotary_emb.inv_freq$"):
        hf_checks.check(model)


def test_no_process_reads_more_of_a_renamed_tensor_than_its_part(tmp_path, monkeypatch):
    """gpt2's tensors are only renamed; each is read once, in one slice."""
    read = []
    original = hf_backend.TensorFiles.read

    def counted(self, name, part):
        read.append((name, tuple(s.stop - s.start for s in part)))
        return original(self, name, part)

    monkeypatch.setattr(hf_backend.TensorFiles, "read", counted)
    model = loaded(foreign(tmp_path / "m", "gpt2"))
    assert len(read) == len({name for name, _ in read}) == len(dict(model.hf.named_parameters()))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_checkpoint_comes_back_byte_for_byte(model_type, tmp_path):
    directory = foreign(tmp_path / "m", model_type)
    model = loaded(directory)
    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
    before, after = (load_file(d / "model.safetensors") for d in (directory, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert hf_backend.decoder_config(directory).vocab == 97


def test_a_job_trains_exports_and_resumes(tmp_path):
    raw = arithmetic(tmp_path)
    vocab = Tokenizer.load(str(tmp_path / "model")).vocab_size
    foreign(tmp_path / "olmo", "olmo2", vocab)
    for file in ("model.safetensors", "config.json"):
        (tmp_path / "olmo" / file).replace(tmp_path / "model" / file)
    raw["model"] = {"path": str(tmp_path / "model"), "backend": "hf"}
    raw["train"] |= {"steps": 12, "lr": 1e-2}
    directory = run(loads(yaml.safe_dump(raw)), "a")
    rows = read_metrics(directory / "metrics.jsonl")
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    probe = json.loads((directory / "probe.json").read_text())
    assert export_difference(directory / "model", probe["tokens"], probe["logprobs"]) < 1e-5
    assert AutoConfig.from_pretrained(directory / "model").model_type == "olmo2"
    raw["model"]["path"] = str(directory / "model")
    again = read_metrics(
        run(loads(yaml.safe_dump({**raw, "train": {**raw["train"], "steps": 1}})), "b") / "metrics.jsonl"
    )
    assert again[0]["loss"] < 0.8 * rows[0]["loss"]


def test_random_weights_depend_on_the_seed_only(tmp_path):
    directory = foreign(tmp_path / "m", "gpt2")

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        spec = SPEC.model_copy(update={"init": "random"})
        return dict(load_model(directory, World(), spec, seed=seed, precision="fp32").hf_tensors())

    a, b, c = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["transformer.wte.weight"], c["transformer.wte.weight"])


SHARDED = {"gpt2": None, "mixtral": None, "olmo2": {"rank": 4}, "gemma4": {"rank": 4}, "llava": None}  # with adapters


def _sharded() -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    world = world_of(MeshSizes(shard=2))
    return [_trained(Path(os.environ["PTF_TEST_MODELS"]) / name, world, lora) for name, lora in SHARDED.items()]


def _spec(lora: dict | None) -> ModelConfig:
    return ModelConfig(path="-", backend="hf", lora=lora)  # type: ignore[arg-type]


def _trained(directory: Path, world: World, lora: dict | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps with a row of each batch on this rank, and one in which only rank 0 has any."""
    rank = world.rank
    model = load_model(directory, world, _spec(lora), seed=0, precision="fp32")
    trainer = Trainer(model, world, DAMPED)
    losses = []
    for step, batch in enumerate(BATCHES[:2]):
        losses.append(trainer.step([_row(batch, rank)], of_keys(SFT), step)["loss"])
    idle = _row(BATCHES[2], 0) if rank == 0 else packed([[]], 30)
    losses.append(trainer.step([idle], of_keys(SFT), 2)["loss"])
    return losses, {n: t.clone() for n, t in model.hf_tensors()}


def _row(batch: Batch, row: int) -> Batch:
    lengths = [[9, 14], [20, 3, 1]], [[25], [7, 7, 7]], [[11, 12], [2, 2]]
    seed = next(i for i, b in enumerate(BATCHES) if b is batch)
    return packed([lengths[seed][row]], 30, seed=100 * seed + row)


@pytest.mark.long
def test_two_ranks_are_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PTF_TEST_MODELS", str(tmp_path))
    directories = [(foreign if name in CONFIGS else wrapper)(tmp_path / name, name) for name in SHARDED]
    found = zip(directories, SHARDED.values(), *two_ranks(_sharded, tmp_path), strict=True)
    for directory, lora, (losses, tensors), (others, _) in found:
        assert losses == others
        model = load_model(directory, World(), _spec(lora), seed=0, precision="fp32")
        trainer = Trainer(model, World(), DAMPED)
        for step, loss in enumerate(losses):
            micro = [_row(BATCHES[step], row) for row in range(2 if step < 2 else 1)]
            assert trainer.step(micro, of_keys(SFT), step)["loss"] == pytest.approx(loss, rel=1e-5)
        for name, tensor in model.hf_tensors():
            assert (tensors[name] - tensor).abs().max() <= 1e-5, name


def job(**changes) -> str:
    raw = {
        "recipe": "sft",
        "model": {"path": "m", "backend": "hf"},
        "data": {"sources": {"a": {"path": "a.jsonl"}}},
        "train": {"steps": 1, "lr": 1e-4},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        raw[section] = {**raw.get(section, {}), name: value} if name else value
    return yaml.safe_dump(raw)


@pytest.mark.parametrize(
    ("changes", "key", "word"),
    [
        ({"model__replace": {"layers.*.mlp": {"use": "a:b"}}}, "model.replace", "is not"),
        ({"model__head": {"use": "a:b"}}, "model.head", "is not"),
    ],
)
def test_what_is_not_there_is_refused_by_name_before_anything_starts(changes, key, word):
    with pytest.raises(ConfigError, match=rf"{key}  ?{word}"):
        loads(job(**changes))
    loads(job())  # control


def test_what_is_no_plain_causal_language_model_is_refused_by_name(tmp_path):
    kinds = {"clip": "multimodal", "t5": "encoder", "vit": "no causal language model of it"}
    for model_type, word in kinds.items():
        AutoConfig.for_model(model_type).save_pretrained(tmp_path / model_type)
        with pytest.raises(UserError, match=word) as error:
            hf_backend.build(tmp_path / model_type)
        assert model_type in str(error.value)
    directory = foreign(tmp_path / "m", "olmo2")
    config = model_files.read_config(directory)
    for change, word in (
        ({"model_type": "olmo9"}, "no such architecture"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised .gptq"),
    ):
        (directory / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=word):
            hf_backend.build(directory)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    config = AutoConfig.for_model(
        "bert", vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="in bert later tokens change what is computed of earlier ones"):
        loaded(tmp_path / "bert")


@pytest.mark.parametrize(("known", "message"), [(True, "wrongly beyond one chunk"), (False, "later tokens change")])
def test_chunks_that_transformers_computes_wrongly_are_refused(tmp_path, monkeypatch, known, message):
    """Found by name, and by what is computed where the name is not known."""
    if not known:
        monkeypatch.setattr(hf_checks, "WRONG_CHUNKS", set())
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "chunk_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16}
    states = {"n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_d_state": 4, "num_mem_blocks": 1, "adapter_rank": 4}
    kinds = {"layers_block_type": ["mamba", "hybrid"], "max_position_embeddings": 256, "initializer_range": 0.2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("zamba2", **sizes, **heads, **states, **kinds)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match=message):
        loaded(tmp_path / "m")


def test_logits_that_are_made_in_another_way_are_refused(tmp_path):
    model = loaded(foreign(tmp_path / "m", "olmo2"))
    hf_checks.check(model)  # control
    model.hf.lm_head.register_forward_hook(lambda module, args, output: output + 0.1 * output.abs().sqrt())
    with pytest.raises(UserError, match="the logits of olmo2 are not its head applied"):
        hf_checks.check(model)


def test_every_tensor_that_does_not_fit_is_named(tmp_path):
    directory = foreign(tmp_path / "m", "olmo2")
    config = model_files.read_config(directory)
    (directory / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 3, "intermediate_size": 47, "layer_types": None})
    )
    with pytest.raises(UserError) as error:
        loaded(directory)
    assert "missing: model.layers.2.mlp.up_proj.weight" in str(error.value)
    assert "wrong shape: model.layers.0.mlp.up_proj.weight is (48, 32), the config says (47, 32)" in str(error.value)
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.1\.mlp\.up_proj\.weight"):
        loaded(directory)
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(UserError, match="cannot be read"):
        loaded(directory)


def test_code_of_a_checkpoint_is_never_run(tmp_path, monkeypatch):
    """Neither the config nor the model is built with code that lies beside the weights."""
    trusted = []
    real = AutoModelForCausalLM.from_config

    def from_config(*args, **kwargs):
        trusted.append(kwargs.get("trust_remote_code", False))
        return real(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    hf_backend.build(checkpoint(tmp_path / "model"))
    assert trusted == [False]
