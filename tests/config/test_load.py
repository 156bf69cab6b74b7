import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ptf.config import ConfigError, Plugin, dump, explain, fingerprint, frozen_differences, load, loads, plugin, resolve
from ptf.config.foreign_names import FOREIGN, hint
from ptf.config.schema import jobs as jobs_by_name
from ptf.config.section import Section
from ptf.config.tree import Node, SourceLocation, _over, merge, parse
from ptf.rl.rewards.declarations import reward_of

SFT = "recipe: sft\nmodel: {path: m}\ndata: {sources: {chat: {path: a.jsonl}}}\ntrain: {steps: 10, lr: 1e-4}\n"
GRPO = (
    SFT.replace("sft", "grpo").replace("path: a.jsonl", "path: a.jsonl, kind: prompt")
    + "rollout: {reward: {use: ptf.rl.rewards:exact, args: {a: 1}}}\n"
)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write `name.yaml` files in a directory of their own, which becomes the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> list[str]:
        for name, text in files.items():
            Path(f"{name}.yaml").write_text(text)
        return [f"{name}.yaml" for name in files]

    return write


def problems(*files: str, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(*files, overrides=overrides)
    return str(refused.value).splitlines()


# --- a value that follows from a key ------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "lookahead"), [(4, 1), (64, 8), (512, 64), (2048, 64), (16383, 64), (16384, 256)])
def test_the_look_ahead_follows_the_length_of_sequences(seq_len: int, lookahead: int) -> None:
    job = loads(SFT.replace("data: {", f"data: {{seq_len: {seq_len}, "))
    assert job.data.packing_lookahead == lookahead
    assert loads(dump(job), overrides=["data.seq_len=16384"]).data.packing_lookahead == 256


def test_a_wrong_length_of_sequences_is_one_problem(write) -> None:
    (problem,) = problems(*write(a=SFT.replace("data: {", "data: {seq_len: long, ")))
    assert "data.seq_len" in problem


# --- round trip -------------------------------------------------------------------------------------------------

texts = st.text(max_size=8) | st.sampled_from(
    [
        "1e-4",
        "yes",
        "on",
        "null",
        "~",
        "0x1F",
        "1_000",
        "2024-01-01",
        "010",
        "1:30",
        "<<",
        "=",
        ".inf",
        "- a",
        "a: b",
        "😀",
    ]
)
names = texts
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
plugins = st.fixed_dictionaries({"use": st.just("pkg.mod:name"), "args": st.dictionaries(names, plain, max_size=3)})
sources = st.dictionaries(
    names.filter(lambda name: not name.startswith("v")),
    st.fixed_dictionaries(
        {"path": texts},
        optional={"kind": st.sampled_from(["chat", "prompt", "tokenized"]), "sampling_weight": st.floats(1e-9, 1e9)},
    ),
    min_size=1,
    max_size=2,
)
positive = st.integers(1, 10**14)


def named(text: str) -> str:
    """A name of a source, of any text."""
    return "s" + "".join(c for c in text if c >= " " and c not in "/\\")[:99]


def agreeing(values: dict) -> dict:
    """The same job with kinds of sources and a length that suit its recipe."""
    online = "rollout" in values
    sources = {named(name): source for name, source in values["data"]["sources"].items()}
    kinds = {
        name: {**s, "kind": "prompt"} if online else {**s, "kind": "chat"} if s.get("kind") == "prompt" else s
        for name, s in sources.items()
    }
    room = {"seq_len": values["data"].get("seq_len", 1) + 256} if online else {}
    return {**values, "data": {**values["data"], "sources": kinds, **room}}


jobs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": texts}, optional={"tokenizer": st.none() | texts}),
        "data": st.fixed_dictionaries(
            {"sources": sources}, optional={"seq_len": positive, "prepare": st.none() | plugins}
        ),
        "train": st.fixed_dictionaries(
            {"steps": positive, "lr": st.floats(1e-300, 1e300)},
            optional={"betas": st.lists(st.floats(0, 1), min_size=2, max_size=2), "min_lr_ratio": st.floats(0, 1)},
        ),
    },
    optional={
        "output": texts,
        "track": st.fixed_dictionaries({"tensorboard": st.booleans()}),
        "compute": st.fixed_dictionaries({"timeout_s": st.integers(1, 99), "address": st.none() | texts}),
        "flow": st.fixed_dictionaries({"stages": st.fixed_dictionaries({}, optional={"train": st.just({"gpu": 1})})}),
    },
).flatmap(
    lambda values: (
        st.sampled_from([{"recipe": "sft"}, {"recipe": "grpo", "algo": {"kl_coef": 0.1}}])
        .flatmap(
            lambda recipe: (
                st.just(recipe)
                if recipe["recipe"] == "sft"
                else plugins.map(lambda reward: recipe | {"rollout": {"reward": reward}})
            )
        )
        .map(lambda recipe: values | recipe)
        | plugins.map(lambda own: values | {"recipe": own, "algo": {"k": 1}})
    ).map(agreeing)
)


@pytest.mark.long
@given(jobs)
def test_dump_and_loads_are_inverse(values):
    job = loads(json.dumps(values))
    assert loads(dump(job)) == job
    assert loads(job.model_dump_json()) == job
    assert dump(loads(dump(job))) == dump(job)


@pytest.mark.long
@given(plain)
def test_any_value_survives_yaml_and_json(value):
    job = loads(SFT).model_copy(update={"recipe": Plugin(use="a:b", args={"value": value})})
    infinite = "Infinity" in json.dumps(value)  # JSON has no word for it
    for written in (dump(job), *([] if infinite else [json.dumps(job.model_dump())])):
        args = loads(written).recipe.args  # type: ignore[union-attr]
        assert repr(args) == repr({"value": value})  # 1 is not True, and 1.0 is not 1


def test_dump_leaves_nothing_out():
    text = dump(loads(SFT))
    assert all(f"{key}:" in text for key in ("weight_decay", "timeout_s", "max_regression", "rollout", "cron"))


# --- the dialect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("5e-07", 5e-07), ("1.0e-5", 1e-5), ("1E3", 1e3), (".5", 0.5), ("1.", 1.0)]
)
def test_numbers_with_an_exponent_are_numbers(text, value):
    assert loads(SFT.replace("1e-4", text)).train.lr == value


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "ON", "y", "'true'", "1"])
def test_only_true_and_false_are_booleans(word):
    with pytest.raises(ConfigError, match="expected true or false"):
        loads(SFT + f"track: {{tensorboard: {word}}}")
    assert loads(SFT + "track: {tensorboard: false}").track.tensorboard is False


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x1F", 31),
        ("1_000", 1000),
        ("~", None),
        ("!!str 1", "1"),
    ],
)
def test_no_surprises_of_yaml_1_1(text, value):
    assert loads(GRPO.replace("{a: 1}", f"{{a: {text}}}")).rollout.reward[""].args == {"a": value}


def test_numbers_are_not_converted_in_silence():
    for text in ("steps: '10'", "steps: 10.0", "steps: true"):
        with pytest.raises(ConfigError, match="expected a whole number"):
            loads(SFT.replace("steps: 10", text))
    with pytest.raises(ConfigError, match="did you mean 1000"):
        loads(SFT.replace("steps: 10", "steps: 1e3"))


# --- problems ---------------------------------------------------------------------------------------------------


def test_all_problems_of_all_files_at_once(write):
    files = write(
        base="evaluate: {sources: {a: {path: x}, b: }}\n",
        a="extends: base.yaml\nrecipe: grpo\nmodel:\n  path: m\n  tokeniser: main\nlr: 1e-4\ndata:\n  sources:\n"
        "    chat: {path: a, kind: chats}\n  partitions: '8'\n",
        b="train:\n  steps: 0\n  max_grad_norm: 1\n  max_grad_norm: 2\nrollout:\n  group_size: 0\n",
    )
    assert problems("a.yaml", "b.yaml", overrides=("trian.lr=3", "compute.workers=x", "seed")) == [
        "--set compute.workers=x  compute.workers  expected a whole number, got the text 'x'",
        "--set seed  expected key.in.dots=value",
        "--set trian.lr=3  trian  unknown key at the top  (did you mean train?)",
        "a.yaml:5  model.tokeniser  unknown key in model  (did you mean tokenizer?)",
        "a.yaml:6  lr  unknown key at the top  (did you mean train.lr?)",
        "a.yaml:9  data.sources.chat.kind  expected one of auto, chat, completion, scored, text, events, preference, "
        "prompt, tokenized, got the text 'chats'"
        "  (did you mean chat?)",
        "a.yaml:10  data.partitions  expected a whole number, got the text '8'",
        "b.yaml:1  train.lr  is missing",
        "b.yaml:2  train.steps  must be greater than 0, got 0",
        "b.yaml:4  train.max_grad_norm  written twice; first at b.yaml:3",
        "b.yaml:6  rollout.group_size  must be greater than 0, got 0",
        "base.yaml:1  evaluate.sources.b  expected a section, got nothing",
    ]
    assert len(files) == 3


def test_one_fault_is_one_problem(write):
    write(a=SFT)
    assert problems("a.yaml", overrides=("train.setps=1",)) == [
        "--set train.setps=1  train.setps  unknown key in train  (did you mean steps?)"
    ]
    assert load("a.yaml").train.steps == 10


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("compute.mesh.pipeline=2", "unknown key in compute.mesh; ptf has no pipeline parallelism"),
        ("compute.mesh.expert_parallel_size=2", "unknown key in compute.mesh; ptf has no expert parallelism"),
        ("train.fp8=true", "unknown key in train; ptf has no training in fewer bits than bf16 (FP8, FP4)"),
        (
            "train.precision=fp8",
            "expected one of auto, fp32, bf16, got the text 'fp8'; "
            "ptf has no training in fewer bits than bf16 (FP8, FP4)",
        ),
        ("data.images=x", "unknown key in data; ptf has no multimodal training; only text is trained"),
    ],
)
def test_what_ptf_does_not_have_is_refused_by_name(write, override, what):
    write(a=SFT)
    assert problems("a.yaml", overrides=(override,)) == [f"--set {override}  {override.split('=')[0]}  {what}"]


def test_rules_between_keys_are_reported_together(write):
    write(a=SFT, v=SFT + "evaluate:\n  sources: {e: {path: x, kind: chat}}\n")
    assert problems(
        "a.yaml",
        "v.yaml",
        overrides=("compute={workers: 3, launcher: local}", "train.warmup_steps=20"),
    ) == [
        (
            "--set compute={workers: 3, launcher: local}  compute.launcher  local is one process; "
            "use ray or torchrun for compute.workers > 1"
        ),
        (
            "--set train.warmup_steps=20  train.warmup_steps  and train.lr_decay_steps together are longer than the "
            "run; shares of it (0.1) fit any number of steps"
        ),
        "v.yaml:3  data.partitions  (8) must be a multiple of compute.workers (3)",
        "v.yaml:4  train.global_batch_sequences  (8) must be a multiple of compute.workers (3)",
        "v.yaml:6  evaluate.sources  needs evaluate.reward to score the responses",
        "v.yaml:6  evaluate.sources.e.kind  must be prompt, not chat",
    ]


def test_held_out_sources_may_have_the_names_of_trained_ones(write):
    """Metrics of trained sources have names of their own: source_loss/NAME, source_reward/NAME."""
    write(a=SFT, b=GRPO)
    load("a.yaml", overrides=("data.validation.chat.path=x",))
    held_out = ("evaluate={sources: {chat: {path: x, kind: prompt}}}", "train.validate_every=2")
    load("b.yaml", overrides=(*held_out, "data.sources.other={path: y, kind: prompt}"))


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("data.sources.chat.kind=chat", "data.sources.chat.kind  must be prompt, not chat"),
        (
            "rollout.engine=vlm",
            (
                "rollout.engine  expected one of auto, vllm, native, or `use: module:name` for your own, "
                "got the text 'vlm'  (did you mean vllm?)"
            ),
        ),
        ("rollout.engine={use: mine}", "rollout.engine.use  expected importable.module:name, got the text 'mine'"),
        (
            "rollout.group_size=1",
            "rollout.group_size  must be at least 2: GRPO compares the responses to one prompt with each other",
        ),
        (
            "rollout.environment={use: 'a:b'}",
            "rollout.reward  rollout.environment gives the rewards of its episodes; give one, not both",
        ),
        (
            "rollout.reward=null",
            "rollout.reward  responses need a reward; give rollout.reward, reward_model, environment, play or harness",
        ),
        ("rollout.reward_model={path: 3}", "rollout.reward_model.path  expected text, got 3"),
        (
            "compute.launcher=torchrun",
            "compute.launcher  torchrun does not support rollouts; use ray, or local with rollout.engine: native",
        ),
        (
            "rollout.max_new_tokens=4000",
            "rollout.max_new_tokens  (4000) leaves no room for a prompt in data.seq_len (2048)",
        ),
    ],
)
def test_what_rollouts_need_is_said_before_they_start(write, override, what):
    write(a=GRPO)
    load("a.yaml")
    assert [problem.partition("  ")[2] for problem in problems("a.yaml", overrides=(override,))] == [what]


def test_vllm_is_refused_in_this_process_and_auto_is_not(write):
    write(a=GRPO)
    load("a.yaml", overrides=["compute.launcher=local"])
    (line,) = problems("a.yaml", overrides=("compute.launcher=local", "rollout.engine=vllm"))
    assert "vllm needs a process of its own, which compute.launcher: local does not give; use native" in line


def test_unknown_recipe(write):
    write(a=SFT.replace("sft", "grop") + "trian: 1\n")
    assert problems("a.yaml") == [
        "a.yaml:1  recipe  no such recipe: the text 'grop'; there are sft, dpo, kd, rm, grpo, ppo, opd, or `use: "
        "module:name` for your own"
        "  (did you mean grpo?)",
        "a.yaml:5  trian  unknown key at the top  (did you mean train?)",
    ]
    for recipe in ("3", "[sft]", ""):
        with pytest.raises(ConfigError, match="no such recipe"):
            loads(SFT.replace("sft", recipe))


def test_a_section_that_the_recipe_lacks():
    with pytest.raises(ConfigError, match="rollout  recipe sft does not take this section"):
        loads(GRPO.replace("grpo", "sft"))
    with pytest.raises(ConfigError, match=r"algo\.kl_coef  unknown key in algo"):
        loads(SFT + "algo: {kl_coef: 0.1}")


def test_missing_and_invalid_files(write):
    write(bad="train:\n  steps: [1\nmodel: {}\n", bad2="a: 1\n\tb: 2\n", top="- 1\n", bom="\ufeff" + SFT, empty="")
    Path("latin.yaml").write_bytes(b"output: \xe9\n")
    assert problems("nope.yaml") == ["nope.yaml  cannot read the config file: no such file"]
    found = problems(
        "nope.yaml", "bad.yaml", "bad2.yaml", "top.yaml", "latin.yaml", overrides=("train.setps=1", "seed=[")
    )
    assert [line.split("  ")[0] for line in found] == [
        "--set seed=[",
        "--set train.setps=1",
        "bad.yaml:3",
        "bad2.yaml:2",
        "latin.yaml",
        "nope.yaml",
        "top.yaml:1",
    ]
    assert load("bom.yaml", "empty.yaml").recipe == "sft"
    assert problems("empty.yaml") == [
        f"empty.yaml:1  {key}  is missing" for key in ("data", "model", "recipe", "train")
    ]


def test_yaml_that_would_not_end_or_has_tags():
    for text, word in (
        ("a: &a {b: *a}", "contains itself"),
        ("a: !!python/none x", "tag"),
        ("a: !!int x", "not of the type int"),
        ("a: \x01", "not valid YAML"),
    ):
        with pytest.raises(ConfigError, match=word):
            loads(SFT + text)


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))])
DEEP = {
    "flow": ("a: " + "[" * 2000 + "]" * 2000, "more than 100 deep"),
    "sections": ("\n".join("  " * i + "a:" for i in range(2000)), "more than 100 deep"),
    "json": ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "more than 100 deep"),
    "aliases": (BOMB, "more than 50,000 values"),
    "digits": ("seed: 1" + "0" * 5000, "has 5001 characters"),
    "hexadecimal": ("seed: 0x" + "f" * 5000, "has 5002 characters"),
    "steps": (
        "train: {steps: 1" + "0" * 30 + ", lr: 1e-4}",
        "must be at most 1000000000000000, got 1000000000000000000000000000000",
    ),
}


@pytest.mark.parametrize("kind", DEEP)
def test_what_would_take_all_memory_or_the_stack_is_one_problem(kind):
    text, what = DEEP[kind]
    with pytest.raises(ConfigError, match=what) as caught:
        loads(text)
    assert len(str(caught.value)) < 1000
    overrides = [f"x={text}"] if kind != "steps" else ["train.steps=1" + "0" * 30]
    with pytest.raises(ConfigError, match=what):
        loads(SFT, overrides)


def test_long_keys_and_chains_of_files_are_one_problem(write):
    with pytest.raises(ConfigError, match="a key of more than 100 sections"):
        loads(SFT, [".".join("a" * 2000) + "=1"])
    files = write(**{f"f{i}": f"extends: f{i + 1}.yaml\n" for i in range(2000)})
    with pytest.raises(ConfigError, match="more than 100 files extend each other"):
        load(files[0])


def test_the_control_what_configs_need_is_read():
    deep = "[" * 90 + "1" + "]" * 90
    job = loads(SFT + f"algo: {{x: {deep}, y: &y [1, 2], z: [*y, *y]}}\n", ["recipe={use: a:b}"])
    assert job.algo["z"] == [[1, 2], [1, 2]]  # type: ignore[index]


# --- merging ----------------------------------------------------------------------------------------------------

trees = st.recursive(  # a name is always a section (capital) or always a leaf, as in a schema
    st.fixed_dictionaries({}, optional={name: st.integers() for name in "abc"}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            **{name: st.integers() | st.lists(st.integers(), max_size=2) for name in "abc"},
            "D": inner,
            "E": inner,
        },
    ),
    max_leaves=8,
)


@given(st.lists(trees, min_size=3, max_size=3))
def test_merge_is_associative_and_the_last_wins(three):
    a, b, c = (_node(tree) for tree in three)
    assert _over(_over(a, b), c) == _over(a, _over(b, c))
    assert _over(a, a) == a
    assert _over(a, _node({})).plain() == a.plain() == _over(_node({}), a).plain()
    merged = _over(a, b).plain()
    assert all(merged[key] == value for key, value in three[1].items() if not isinstance(value, dict))
    assert merged.keys() == three[0].keys() | three[1].keys()


def _node(value) -> Node:
    if isinstance(value, dict):
        value = {key: _node(inner) for key, inner in value.items()}
    return Node([_node(inner) for inner in value] if isinstance(value, list) else value, SourceLocation("x", 1))


def test_extends_is_relative_to_the_file_and_lies_below_it(write, tmp_path):
    write(a="extends: [sub/b.yaml, c.yaml]\ntrain: {lr: 3e-4}\n", c="train: {steps: 7, lr: 2e-4}\n")
    Path("sub").mkdir()
    Path("sub/b.yaml").write_text("extends: d.yaml\ntrain: {steps: 5, warmup_steps: 2}\n")
    Path("sub/d.yaml").write_text(SFT)
    train = load("a.yaml").train
    assert (train.steps, train.warmup_steps, train.lr) == (7, 2, 3e-4)
    assert load(tmp_path / "a.yaml") == load("a.yaml")
    assert loads("extends: a.yaml") == load("a.yaml")


def test_extends_refuses_circles_and_absent_files(write):
    write(
        a="extends: b.yaml\n" + SFT,
        b="\nextends: ./a.yaml\n",
        c=SFT + "extends: nope.yaml\n",
        d=SFT + "extends: 3\n",
        twice="extends: [base.yaml, base.yaml]",
        base=SFT,
    )
    assert problems("a.yaml") == [
        "b.yaml:2  extends  the files extend each other in a circle: a.yaml → b.yaml → a.yaml"
    ]
    assert problems("c.yaml") == ["c.yaml:5  extends  cannot read the config file nope.yaml: no such file"]
    assert problems("d.yaml") == ["d.yaml:5  extends  expected a file name, or a list of them"]
    assert load("twice.yaml") == load("base.yaml")  # twice is no circle


def test_overrides(write):
    write(a=GRPO)
    job = load(
        "a.yaml",
        overrides=[
            "train.lr=1e-5",
            "train.lr=2e-5",
            "compute.address=",
            "data.sources.more={path: x, kind: prompt, sampling_weight: 2}",
            "model.path=s3://b/k=v",
        ],
    )
    assert job.train.lr == 2e-5
    assert job.compute.address is None
    assert job.data.sources["more"].sampling_weight == 2
    assert job.model.path == "s3://b/k=v"


def test_a_plug_is_replaced_when_it_names_another(write):
    write(a=GRPO)

    def reward(*overrides):
        return load("a.yaml", overrides=overrides).rollout.reward[""]  # type: ignore[union-attr]

    assert reward("rollout.reward.args.b=2").args == {"a": 1, "b": 2}
    assert reward("rollout.reward={use: 'ptf.rl.rewards:exact', args: {b: 2}}").args == {"a": 1, "b": 2}
    assert reward("rollout.reward.use=my.mod:other").args == {}
    assert reward("rollout.reward={use: my.mod:other, args: {b: 2}}").args == {"b": 2}
    assert load(
        "a.yaml", overrides=["data.sources.use.path=x", "data.sources.use.kind=prompt"]
    ).data.sources.keys() == {"chat", "use"}


def test_merge_keeps_the_place_of_every_key(write):
    write(a=SFT, b="train:\n  lr: 1\n")
    root = merge("a.yaml", "b.yaml", overrides=["train.max_grad_norm=2"]).root
    assert [str(root.nearest(["train", key])) for key in ("steps", "lr", "max_grad_norm", "absent")] == [
        "a.yaml:4",
        "b.yaml:2",
        "--set train.max_grad_norm=2",
        "b.yaml:1",
    ]


# --- what is made of a job --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("data.train_on=asistant", "expected assistant, last, all or field:NAME, got the text 'asistant'"),
        ("data.date=2024/1/1", "expected a date like 2026-01-31, got the text '2024/1/1'"),
        ("data.prepare.use=mine", "expected importable.module:name, got the text 'mine'"),
    ],
)
def test_a_text_of_another_form_is_refused_with_the_form(override, what):
    with pytest.raises(ConfigError, match=re.escape(what)):
        loads(SFT, [override])


def test_a_copy_of_a_section_has_no_other_keys():
    train = loads(SFT).train
    assert train.model_copy(update={"lr": 1.0}).lr == 1.0
    with pytest.raises(TypeError, match="TrainConfig has no learning_rate"):
        train.model_copy(update={"learning_rate": 1.0})


def test_fingerprint_depends_on_the_named_sections_only():
    a, b = loads(SFT), loads(SFT.replace("1e-4", "2e-4"))
    assert fingerprint(a) == fingerprint(loads(dump(a)))
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(a, "data", "model.path") == fingerprint(b, "data", "model.path")
    assert fingerprint(a, "train") != fingerprint(b, "train")
    assert fingerprint(a, "train.steps") == fingerprint(b, "train.steps")
    assert fingerprint(a, "rollout.reward") == fingerprint(b, "rollout.reward")
    with pytest.raises(KeyError):
        fingerprint(a, "data.nothing")


def test_resolve_puts_paths_in_place():
    job = loads(
        SFT.replace("path: m", "path: job:sft.yaml, tokenizer: prepare:tok").replace(
            "a.jsonl", "prepare:a.jsonl, sampling_weight: 2, epochs: 3, limit: 9, columns: {messages: m}"
        )
        + (
            "evaluate: {sources: {e: {path: prepare:e, kind: prompt}}, reward: {use: a:b, args: {tables: [prepare:t, "
            "plain]}}}\noutput: prepare:kept\n"
        )
    )
    assert resolve(job) == job
    done = resolve(
        job, prepared="s3://p", models={"job:sft.yaml": "/ckpt"}, tokenized={"chat": "/tok/chat", "other": "x"}
    )
    assert (done.model.path, done.model.tokenizer, done.output) == ("/ckpt", "s3://p/tok", "prepare:kept")
    done_chat = {
        "path": "/tok/chat",
        "row_count": None,
        "kind": "tokenized",
        "sampling_weight": 2.0,
        "columns": {},
        "limit": None,
        "epochs": 3,
    }
    assert done.data.sources["chat"].model_dump() == done_chat
    pinned = resolve(loads(SFT.replace("a.jsonl", "open/gsm")), datasets={"data.sources.chat": "open/gsm@c0ffee"})
    assert pinned.data.sources["chat"].path == "open/gsm@c0ffee"
    assert done.evaluate.sources["e"].path == "s3://p/e"
    assert done.evaluate.reward == Plugin(use="a:b", args={"tables": ["s3://p/t", "plain"]})
    assert resolve(loads(SFT)).model.path == "m"
    assert type(done) is type(job)


def test_frozen_differences_names_the_frozen_keys_only(write):
    write(old=GRPO)
    old = load("old.yaml")

    def differences(*overrides):
        return frozen_differences(old, load("old.yaml", overrides=overrides))

    assert differences() == []
    free = [
        "compute.workers=2",
        "compute.mesh.replicate=2",
        "train.micro_batch_sequences=1",
        "flow.stages.train.gpu=1",
        "checkpoint.every=7",
        "train.optimizer=adamw_offload",  # the same bits as adamw
    ]
    assert differences(*free) == []
    assert differences("train.optimizer=adamw_8bit") == ['train.optimizer: "adamw" → "adamw_8bit"']
    assert differences("train.lr=2e-4", "rollout.reward.args.a=2", "compute.workers=2") == [
        "rollout.reward.args.a: 1 → 2",
        "train.lr: 0.0001 → 0.0002",
    ]
    (added,) = differences("data.sources.b={path: x, kind: prompt}")
    assert added.startswith('data.sources.b: absent → {"path": "x", ')
    assert [line.split(":")[0] for line in frozen_differences(old, loads(SFT))] == [
        "recipe",
        "data.sources.chat.kind",
        "algo",
        "rollout",
    ]


# --- plugins ------------------------------------------------------------------------------------------------------


def test_a_plug_is_its_callable_with_args_bound():
    assert plugin.resolve("json:dumps") is json.dumps
    assert plugin.bind(Plugin(use="json:dumps", args={"indent": 1}))([1]) == "[\n 1\n]"
    append = Plugin(use="tests.config.test_load:appended", args={"to": []})
    for bound in (plugin.bind(append), reward_of(append)):
        assert [bound(1), bound(2), bound(3, to=[0])] == [[1], [2], [0, 3]]


def appended(value, to):
    to.append(value)
    return to


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("ptf.confg.load:x", "no module 'confg' in the package ptf  (did you mean config?)"),
        ("ptf.config.load:lods", "the module ptf.config.load has no 'lods'  (did you mean loads?)"),
        ("jsno:dumps", "no module 'jsno' in the Python path"),
        ("ptf.config.load.deep:x", "which is no package"),
        ("json.dumps", "is not of the form pkg.mod:name"),
    ],
)
def test_a_wrong_plug_is_answered_with_the_nearest(use, words):
    with pytest.raises(ConfigError) as refused:
        plugin.resolve(use)
    assert words in str(refused.value)


def test_an_error_inside_the_plugged_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_plug.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        plugin.resolve("broken_plug:x")
    with pytest.raises(ConfigError, match="not callable"):
        plugin.bind(Plugin(use="sys:path"))


def test_config_and_storage_load_no_torch():
    """Nor do the first and the last words of a flow, nor rewards, of which each has a process."""
    code = (
        "import sys, ptf.config, ptf.config.plugin, ptf.storage, ptf.cli, ptf.run, ptf.evaluate.gate, "
        "ptf.data.sources.rows, ptf.publish.model_card, ptf.tasks.arithmetic, ptf.tasks.slates, "
        "ptf.rl.worker_process; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names_of_other_frameworks_lead_to_keys_that_exist():
    """Every one, in a job that has the key."""
    known = {recipe: {key for key, _ in explain.keys(job)} for recipe, job in jobs_by_name().items()}
    every = set().union(*known.values())
    for name, (here, _) in FOREIGN.items():
        assert set(here) <= every, name
        assert name not in every, f"{name} is a key of ptf"
        assert any(hint(name, of) for of in known.values())
    assert hint("nothing_of_this_name", every) == ""
    brought = {"use_rslora": "model.lora.alpha", "lora_alpha": "model.lora.alpha", "max_steps": "train.steps"}
    brought |= {"num_generations": "rollout.group_size", "grad_clip": "train.max_grad_norm"}
    assert all(key in FOREIGN[name][0] for name, key in brought.items())


@pytest.mark.parametrize(
    ("name", "offline", "online"),
    [
        ("eval_dataset", "data.validation", "evaluate.sources"),
        ("batch_size", "train.global_batch_sequences", "rollout.prompts_per_step"),
        ("num_train_epochs", "train.epochs", "train.steps"),
    ],
)
def test_a_hint_names_a_key_that_the_recipe_uses(name, offline, online):
    for text, found in ((SFT, offline), (GRPO, online)):
        with pytest.raises(ConfigError, match=re.escape(f"unknown key in train  (here it is {found}")):
            loads(text, [f"train.{name}=1"])


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("train.learning_rate", "unknown key in train  (here it is train.lr)"),
        (
            "train.warmup_ratio",
            "unknown key in train  (here it is train.warmup_steps: below 1 it is a share of the run)",
        ),
        (
            "gradient_accumulation_steps",
            "unknown key at the top  (here it is train.micro_batch_sequences: passes follow from it and "
            "train.global_batch_sequences)",
        ),
        (
            "data.max_seq_length",
            "unknown key in data  (here it is data.seq_len: tokens of a packed sequence; prompt and response together)",
        ),
        (
            "train.batch_size",
            "unknown key in train  (here it is train.global_batch_sequences: of a whole step, over all workers: packed",
        ),
        ("train.num_generations", "unknown key in train; known: "),  # SFT generates nothing
        ("train.lrr", "unknown key in train  (did you mean lr?)"),
    ],
)
def test_a_key_that_another_framework_has_is_answered_with_ours(key, found):
    with pytest.raises(ConfigError) as refused:
        loads(SFT, [f"{key}=1"])
    (line,) = str(refused.value).splitlines()
    assert line.partition(f"  {key}  ")[2].startswith(found)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("train.warmup_steps=0.1", None),
        ("train.lr_decay_steps=0.9", None),
        (
            "{train.warmup_steps: 0.2, train.lr_decay_steps: 0.9}",
            "train.warmup_steps  and train.lr_decay_steps together are longer than the run",
        ),
        (
            "train.warmup_steps=1.0",
            "train.warmup_steps  a share of the run lies between 0 and 1, steps are whole numbers, got 1.0",
        ),
        ("train.warmup_steps=-1", "train.warmup_steps  must be at least 0, got -1"),
        (
            "train.warmup_steps=ten",
            "train.warmup_steps  expected a number of steps or a share of the run (0.1), got the text 'ten'",
        ),
        ("train.lr_decay_steps=0", "train.lr_decay_steps  must be greater than 0"),
        (
            "{train.lr_decay_steps: 0.2, train.lr_decay_at_loss: 1.0, train.epochs: 1, train.steps: null}",
            "train.lr_decay_at_loss  needs train.lr_decay_steps as a number of steps",
        ),
    ],
)
def test_warm_up_and_decay_are_steps_or_shares_of_the_run(value, found):
    given = [value] if "{" not in value else value.strip("{}").replace(": ", "=").split(", ")
    if found is None:
        assert loads(dump(loads(SFT, given))) == loads(SFT, given)
    else:
        with pytest.raises(ConfigError) as refused:
            loads(SFT, given)
        assert any(line.partition("  ")[2].startswith(found) for line in str(refused.value).splitlines())


@pytest.mark.parametrize("config", sorted(map(str, Path(__file__).parents[2].glob("configs/*/*.yaml"))))
def test_shipped_configs_take_any_number_of_steps(config):
    if loads(dump(load(config))).train.steps:
        assert load(config, overrides=["train.steps=20"]).train.steps == 20


def test_a_text_may_have_as_many_values_as_its_limit_and_no_more(monkeypatch):
    monkeypatch.setattr("ptf.config.tree.MANY", 12)  # two maps, a list and nine numbers
    text = "a: {b: [1, 2, 3, 4, 5, 6, 7, 8, 9]}"
    assert not parse(text).problems
    assert "more than 12 values" in str(parse(text.replace("9]", "9, 10]")).problems)


def _sections(kind: type = Section) -> set[type]:
    return {kind}.union(*map(_sections, kind.__subclasses__()))


def test_every_default_is_a_value_that_its_key_accepts():
    """pydantic does not check defaults."""
    jobs_by_name()  # imports every recipe's section
    checked = 0
    for section in _sections():
        for field in section.model_fields.values():
            if not field.is_required():
                default = field.get_default(call_default_factory=True)
                kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
                TypeAdapter(kind).validate_python(default)
                checked += 1
    assert checked > 150


def test_overrides_alone_are_a_config():
    root = merge(overrides=["train.lr=2", "recipe=sft"]).root
    assert sorted(root.value) == ["recipe", "train"]
    assert root.value["train"].value["lr"].value == 2
    assert str(merge().root.place).startswith("no file")
