"""Old names of keys, values and plugins: refused in what people write, translated in what
an older version of ptf has stored."""

import hashlib
import inspect
import json
import shutil
from pathlib import Path

import pytest

from ptf.config import ConfigError, Job, dump, fingerprint, frozen_differences, load, loads
from ptf.config.explain import keys, section_at
from ptf.config.plugin import resolve
from ptf.config.plugin_checks import load_checked
from ptf.config.renames import (
    ARGUMENTS,
    FIRST_KEYS,
    FIRST_MODULES,
    FIRST_PATTERNS,
    FIRST_VALUES,
    KEYS,
    MODULES,
    PATTERNS,
    VALUES,
    outdated,
    renamed,
    with_first_names,
)
from ptf.config.schema import job_class
from ptf.config.tree import read
from ptf.errors import UserError
from ptf.run import read_job_file, write_job_file
from ptf.storage import Corrupt
from ptf.train.resume import raise_if_fixed_keys_changed

# job.yaml as `record` of ptf at c9bfe39 wrote it, in directories of these names, and the fingerprints that were taken
STORED = Path(__file__).parent / "stored"
# Of sections that no key was added to since: a new key changes the fingerprint of the section that it is in.
WHOLE = {"grpo": "2729c3c1584d011c", "events": "ed28b8b497812802"}
FINGERPRINTS = {
    "grpo": {"data.prepare": "197ac03e6692109a", "train": "61d8224cbf953ff0"},
    "events": {"data.prepare": "ae3d454da9e0823f", "train": "1899e0c9c37a944a"},
}
OLD = """\
# what is trained
recipe: {use: "ptf.recipes.next_item:NextItem"}   # a head
model: {path: m}
data:
  prepare:
    use: ptf.data.events:generated  # moved
    args: {users: 10}
  sources: {a: {path: a.jsonl, kind: events, rows: 7}}   # `rows` of a source are counted
  "lanes": 4

train: {steps: 10, 'rows': 8, lr: 1e-4,
        micro_rows: 2}
compute: {pools: {all: {roles: [policy, rollout], park: disk}}}
evaluate: {start: true}
publish: {gate: "start", max_drop: 0.1}  # at the start
flow:
  sweep:
    - {publish.gate: start, train.rows: 4, data.prepare.use: "ptf.data.events:prepare"}
"""
SFT = "recipe: sft\nmodel: {path: m}\ndata: {sources: {a: {path: a.jsonl}}}\ntrain: {steps: 10, lr: 1e-4}\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*files: str, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(*files, overrides=overrides)
    return str(refused.value).splitlines()


# --- the table --------------------------------------------------------------------------------------------------


def test_new_keys_are_there_and_old_ones_are_not():
    there = {key for recipe in ("sft", "grpo", "kd", "rm", "ppo") for key, _ in keys(job_class(recipe))}
    assert set(KEYS.values()) <= there
    assert not set(KEYS) & there


def test_every_key_that_a_version_had_is_a_key_or_has_a_new_name():
    """stored/keys.txt has the keys of every earlier version: a rename that is not in the table would lose one."""
    today = {key for recipe in ("sft", "dpo", "kd", "rm", "grpo", "ppo", "opd") for key, _ in keys(job_class(recipe))}
    earlier = (STORED / "keys.txt").read_text().split()
    assert len(earlier) > 300
    assert today <= {*earlier}, "add the new keys to stored/keys.txt"
    for key in earlier:
        values: dict[str, object] = {}
        inner = values
        *sections, last = key.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = None
        now = renamed(values, outdated(values))
        assert _only_key(now) in today, key


def _only_key(values: object) -> str:
    """Return the dotted key of nested sections with one key each."""
    steps = []
    while isinstance(values, dict):
        [(step, values)] = values.items()
        steps.append(step)
    return ".".join(steps)


def test_the_table_can_be_read_in_both_directions():
    assert FIRST_KEYS.keys() == {*KEYS.values()}
    assert FIRST_KEYS["train.global_batch_sequences"] == "train.rows"  # not `sequences`, which it was in between
    assert len(FIRST_MODULES) == len(MODULES)
    assert not {*KEYS} & {*KEYS.values()}
    assert not {*MODULES} & {*MODULES.values()}
    for old, new in KEYS.items():
        assert old.rpartition(".")[0] == new.rpartition(".")[0]  # a key stays in its section
        assert not any(other.startswith(f"{old}.") for other in KEYS)  # and no section of the table is in the table
    for key, values in VALUES.items():
        assert FIRST_VALUES[KEYS.get(key, key)].keys() >= {*values.values()}
        assert not {*values} & {*values.values()}
    assert FIRST_VALUES["algo.importance_sampling_level"] == {
        "sequence": "answer"
    }  # not `sample`, which it was in between
    assert FIRST_VALUES["algo.loss_aggregation"]["episode_mean"] == "answers"  # nor `sequence_mean`
    assert FIRST_PATTERNS.keys() == PATTERNS.keys()
    for use, arguments in ARGUMENTS.items():
        taken = inspect.signature(resolve(use)).parameters
        assert {*arguments.values()} <= taken.keys()
        assert not arguments.keys() & taken.keys()
    assert not PATTERNS.keys() & {*KEYS, *KEYS.values(), *VALUES}
    assert section_at(Job, ["train", "early_stopping"]) is not None


def test_modules_that_moved_are_where_the_table_says():
    root = Path(__file__).parents[2]
    for old, new in MODULES.items():
        path = root / new.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), new
        assert not (root / old.replace(".", "/")).with_suffix(".py").exists(), old


# --- refused ----------------------------------------------------------------------------------------------------


def test_old_names_are_refused_at_their_lines(here):
    Path("job.yaml").write_text(OLD)
    assert refusal("job.yaml") == [
        "job.yaml:2  recipe.use  ptf.recipes.next_item:NextItem is now ptf.events.item_head:NextItem",
        "job.yaml:6  data.prepare.use  ptf.data.events:generated is now ptf.events.prepare:generated",
        "job.yaml:8  data.sources.a.rows  is now data.sources.a.row_count",
        "job.yaml:9  data.lanes  is now data.partitions",
        "job.yaml:11  train.rows  is now train.global_batch_sequences",
        "job.yaml:12  train.micro_rows  is now train.micro_batch_sequences",
        "job.yaml:13  compute.pools  is for recipes with rollouts; others have one group of compute.workers: remove it",
        "job.yaml:13  compute.pools.all.park  is now compute.pools.all.offload",
        "job.yaml:14  evaluate.start  is now evaluate.measure_starting_model",
        "job.yaml:15  publish.gate  start is now starting_model",
        "job.yaml:15  publish.max_drop  is now publish.max_regression",
        "job.yaml:18  data.prepare.use  ptf.data.events:prepare is now ptf.events.prepare:prepare",
        "job.yaml:18  publish.gate  start is now starting_model",
        "job.yaml:18  train.rows  is now train.global_batch_sequences",
    ]


def test_what_is_wrong_besides_is_found_at_its_line_too(here):
    Path("a.yaml").write_text(SFT.replace("lr:", "rows: none,\n  lr:"))
    assert refusal("a.yaml") == [
        "a.yaml:4  train.global_batch_sequences  expected a whole number, got the text 'none'",
        "a.yaml:4  train.rows  is now train.global_batch_sequences",
    ]


def test_each_file_is_named(here):
    Path("base.yaml").write_text("train: {micro_rows: 2}\n")
    Path("a.yaml").write_text("extends: base.yaml\n" + SFT.replace("lr:", "rows: 4, micro_batch_sequences: 1, lr:"))
    assert refusal("a.yaml") == [
        "a.yaml:5  train.rows  is now train.global_batch_sequences",
        "base.yaml:1  train.micro_rows  is now train.micro_batch_sequences",
    ]


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("train.rows=4", "train.rows  is now train.global_batch_sequences"),
        ("train={rows: 4}", "train.rows  is now train.global_batch_sequences"),
        ("train.stop.patience=4", "train.stop  is now train.early_stopping"),
        ("compute.pools.a.park=disk", "compute.pools.a.park  is now compute.pools.a.offload"),
        (
            "data.prepare.use=ptf.data.events:prepare",
            "data.prepare.use  ptf.data.events:prepare is now ptf.events.prepare:prepare",
        ),
        ("publish.gate=start", "publish.gate  start is now starting_model"),
        ("publish.max_drop=0.1", "publish.max_drop  is now publish.max_regression"),
        ("algo.mean_over=answers", "algo.mean_over  is now algo.loss_aggregation"),
        ("data.sources.a.weight=2", "data.sources.a.weight  is now data.sources.a.sampling_weight"),
        ("algo.loss_aggregation=sequence_mean", "algo.loss_aggregation  sequence_mean is now episode_mean"),
        ("algo.ratio=answer", "algo.ratio  is now algo.importance_sampling_level"),
        ("publish.metric=test/pass@1", "publish.metric  test/pass@1 is now greedy_pass_rate/test"),
        ("publish.metric=pass@1/test", "publish.metric  pass@1/test is now greedy_pass_rate/test"),
        ("publish.metric=next/all/ndcg@10", "publish.metric  next/all/ndcg@10 is now all/ndcg@10/next"),
    ],
)
def test_an_override_is_refused_with_the_new_name(here, override, what):
    Path("a.yaml").write_text(SFT)
    assert f"--set {override}  {what}" in refusal("a.yaml", overrides=(override,))
    with pytest.raises(ConfigError, match=r"is now [\w.:]+$"):
        loads(SFT, ["train.rows=4"])


def test_both_names_at_once_are_refused(here):
    Path("a.yaml").write_text(SFT.replace("lr:", "rows: 4, global_batch_sequences: 8, lr:"))
    said = "train.rows  is now train.global_batch_sequences, which is set too; remove one"
    assert refusal("a.yaml") == [f"a.yaml:4  {said}"]
    with pytest.raises(ConfigError, match="remove one"):
        loads(Path("a.yaml").read_text())


GRPO = """\
recipe: grpo
model: {path: m}
data: {sources: {p: {path: p.jsonl, kind: prompt}}}
rollout:
  reward:
    use: ptf.rl.rewards:weighted
    args:
      parts:
        - {use: "ptf.rl.rewards:http", args: {url: "http://a", in_flight: 3}}  # a server
        - {use: "mine:reward", args: {in_flight: 3}}
train: {steps: 10, lr: 1e-4}
compute:
  pools:
    learning: {roles: [policy]}
    sampling: {roles: [rollout, 'reward']}  # the model
"""
GRPO_TODAY = GRPO.replace("in_flight: 3}}  #", "max_concurrent_calls: 3}}  #").replace("'reward'", "'reward_model'")
PART = "rollout.reward.args.parts.0.args"
RENAMES = [
    f"a.yaml:9  {PART}.in_flight{{}} is now {PART}.max_concurrent_calls",
    "a.yaml:15  compute.pools.sampling.roles  reward is now reward_model",
]


def test_an_argument_and_an_item_of_a_list_are_refused_and_translated(here):
    Path("a.yaml").write_text(GRPO)
    assert refusal("a.yaml") == [f"{line.format(' ')}" for line in RENAMES]
    today = loads(GRPO_TODAY)
    assert today.compute.pools["sampling"].roles == ["rollout", "reward_model"]
    first = with_first_names(today.model_dump())
    assert first["compute"]["pools"]["sampling"]["roles"] == ["rollout", "reward"]
    http, own = first["rollout"]["reward"]["args"]["parts"]
    assert http["args"] == {"url": "http://a", "in_flight": 3}
    assert own["args"] == {"in_flight": 3}  # a reward of the user's own
    assert loads(GRPO) == today  # what a run has stored
    assert fingerprint(loads(GRPO)) == fingerprint(today)


@pytest.mark.parametrize("name", ["http", "http_batch", "judge"])
def test_an_argument_in_an_override_is_refused_with_its_new_name(here, name):
    reward = f"  reward: {{use: 'ptf.rl.rewards:{name}', args: {{url: 'http://a'}}}}\n"
    start, end = GRPO.index("  reward:"), GRPO.index("train:")
    Path("a.yaml").write_text(GRPO_TODAY[:start] + reward + GRPO[end:].replace("'reward'", "'reward_model'"))
    with pytest.raises(ConfigError, match=r"has no argument 'in_flight': it is now max_concurrent_calls"):
        load_checked("a.yaml", overrides=["rollout.reward.args.in_flight=3"])


def test_both_names_of_an_argument_at_once_are_refused():
    with pytest.raises(ConfigError, match=r"args\.in_flight  is now .*\.max_concurrent_calls, which is set too"):
        loads(GRPO.replace("in_flight: 3}}  #", "in_flight: 3, max_concurrent_calls: 4}}  #"))


def test_a_value_that_was_renamed_twice_has_one_fingerprint():
    """Whatever version wrote the job: `mean_over: answers`, `mean_over: sequences` or `loss_aggregation: …`."""
    recipe = GRPO_TODAY.replace("rollout:", "algo: {KEY}\nrollout:", 1)
    keys = ("mean_over: answers", "mean_over: samples", "mean_over: sequences", "loss_aggregation: sequence_mean")
    jobs = [loads(recipe.replace("KEY", key)) for key in (*keys, "loss_aggregation: episode_mean")]
    assert {job.algo.loss_aggregation for job in jobs} == {"episode_mean"}
    assert len({fingerprint(job, "algo") for job in jobs}) == 1
    assert with_first_names(jobs[0].model_dump())["algo"]["mean_over"] == "answers"
    with pytest.raises(ConfigError, match="loss_aggregation"):
        loads(recipe.replace("KEY", "loss_aggregation: sequences"))


def test_names_of_the_users_own_are_left_alone():
    own = {
        "data": {"sources": {"lanes": {"path": "a", "row_count": 3, "columns": {"rows": "r"}}}},
        "train": {"lr_multipliers": {"rows": 2.0}},
        "evaluate": {"metrics": {"stop": {"use": "mine:stop", "args": {"rows": 1, "group": 2, "gate": "start"}}}},
        "publish": {"to": "start"},
        "flow": {"stages": {"train": {"env_vars": {"park": "x"}}}},
    }
    assert outdated(own) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("test/pass@1", "greedy_pass_rate/test"),
        ("test/pass@8", "pass@8/test"),
        ("test/reward", "greedy_reward/test"),
        ("test/no_result", "no_result_share/test"),
        ("next/all/ndcg@10", "all/ndcg@10/next"),
        ("next/new/revenue_recall@5", "new/revenue_recall@5/next"),
    ],
)
def test_a_metric_of_answers_begins_with_its_name(old, new):
    """What a run has stored is read, and its fingerprint is that of the old name."""
    job = loads(SFT + f"publish: {{metric: '{old}'}}\n")
    assert job.publish.metric == new
    assert with_first_names(job.model_dump())["publish"]["metric"] == old
    assert outdated({"publish": {"metric": new}}) == []


@pytest.mark.parametrize(
    "name",
    [
        *("train/reward", "loss/test", "loss/reward", "accuracy/no_result", "kl/dev", "test/mine"),
        # of a held-out source that is called reward or no_result
        *("greedy_reward/reward", "greedy_pass_rate/reward", "pass@8/reward", "no_result_share/reward"),
        *("greedy_reward/no_result", "no_result_share/no_result", "starting_model/reward"),
    ],
)
def test_other_metrics_are_left_alone(name):
    assert outdated({"publish": {"metric": name}}) == []
    assert outdated({"train": {"early_stopping": {"metric": "dev/pass@1"}}}) == []


def test_an_old_key_below_an_old_section_is_refused_with_both_new_names():
    with pytest.raises(ConfigError) as refused:
        loads(SFT, ["train.stop.mode=min"])
    lines = str(refused.value).splitlines()
    assert "--set train.stop.mode=min  train.stop  is now train.early_stopping" in lines
    assert any("is now train.early_stopping.metric_direction" in line for line in lines)


def test_a_moved_plugin_says_where_it_is():
    with pytest.raises(ConfigError, match=r"is now ptf\.rl\.engines\.native:NativeEngine"):
        resolve("ptf.rl.native_engine:NativeEngine")
    assert callable(resolve("ptf.rl.rewards:exact"))


def test_shipped_configs_are_current():
    root = Path(__file__).parents[2]
    for file in [*root.glob("configs/**/*.yaml"), *root.glob("tests/**/*.yaml"), *root.glob("benchmarks/**/*.yaml")]:
        if STORED not in file.parents:
            tree = read(file.read_text(), str(file))
            assert (tree.problems, outdated(tree.root.plain())) == ([], []), file


# --- stored -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=sorted(FINGERPRINTS))
def stored(request, tmp_path) -> Path:
    """The directory of a run that an older version began."""
    shutil.copytree(STORED / request.param, tmp_path / request.param)
    return tmp_path / request.param


def todays_job(stored: Path) -> Job:
    """What the user has today: the same config, with the new names."""
    text = read_job_file(stored)
    assert text is not None
    (stored / "today.yaml").write_text(dump(loads(text)))
    return load(stored / "today.yaml")


def test_a_stored_job_is_the_job_of_today(stored):
    text = read_job_file(stored)
    assert text is not None
    assert outdated(read(text, "job.yaml").root.plain())
    today = todays_job(stored)
    assert loads(text) == today == load(stored / "job.yaml")
    assert loads(dump(today)) == today
    assert load(stored / "job.yaml", overrides=["train.micro_batch_sequences=1"]).train.micro_batch_sequences == 1


def test_a_stored_job_that_was_changed_in_any_byte_is_refused(stored):
    file = stored / "job.yaml"
    text = file.read_text()
    above, _, seal = text.rstrip("\n").rpartition("\n")
    changed = [
        f"{text}\n",
        f"{text} ",
        text.rstrip("\n"),
        f"{above} \n{seal}\n",
        f"{above}\n\n{seal}\n",
        above,
        "",
        seal,
    ]
    for other in (*changed, text.replace("\n", "\r\n"), f"{text}{seal}\n"):
        file.write_bytes(other.encode())
        with pytest.raises(Corrupt, match="was changed after this run wrote it"):
            read_job_file(stored)
    file.write_bytes(text.encode())
    assert read_job_file(stored) == f"{above}\n"


def test_its_run_is_resumed_and_recorded_under_todays_names(stored):
    text, today = read_job_file(stored), todays_job(stored)
    assert text is not None
    assert frozen_differences(loads(text), today) == []
    raise_if_fixed_keys_changed(text, today)
    write_job_file(today, stored)
    assert read_job_file(stored) == dump(today)
    other = today.model_copy(update={"train": today.train.model_copy(update={"global_batch_sequences": 16})})
    (stored / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"train\.global_batch_sequences: 4 → 16"):
        write_job_file(other, stored)


def test_a_start_that_made_nothing_does_not_fix_the_keys(stored, tmp_path):
    today = todays_job(stored)
    other = today.model_copy(update={"train": today.train.model_copy(update={"global_batch_sequences": 16})})
    write_job_file(today, tmp_path / "run")
    (tmp_path / "run" / "lease.json").touch()
    write_job_file(other, tmp_path / "run")
    assert read_job_file(tmp_path / "run") == dump(other)
    (tmp_path / "run" / "start").mkdir()  # random weights of the job that was refused
    write_job_file(today, tmp_path / "run")
    assert not (tmp_path / "run" / "start").exists()
    write_job_file(other, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"train\.global_batch_sequences: 16 → 4"):
        write_job_file(today, tmp_path / "run")


def digest(values: dict) -> str:
    """What `fingerprint` makes of values with their first names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def test_its_fingerprints_are_those_that_were_taken(stored):
    job = todays_job(stored)
    assert fingerprint(job, "data.prepare") == FINGERPRINTS[stored.name]["data.prepare"]
    whole = with_first_names(job.model_dump())
    # these were added since
    del whole["publish"]["what"], whole["model"]["quantization"], whole["data"]["consecutive_turns"]
    del whole["train"]["optimizer_offload"], whole["train"]["optimizer"], whole["train"]["fused"]
    later = ("credit_level", "overlong_filter", "turn_discount", "tis_level", "tis_mode", "policy_loss", "dual_clip")
    for key in later:
        whole["algo"].pop(key, None)
    assert digest({"train": whole["train"]}) == FINGERPRINTS[stored.name]["train"]
    added = (
        "batches",
        "in_flight",
        "max_staleness",
        "slice_tokens",
        "clock",
        "update_slices",
        "environment_slices",
        "environment_processes",
        "environment_timeout_s",
        "environment_retries",
        "play",
        "harness",
        "rewards",
        "environments",
        "episode_timeout_s",
    )
    for key in ("max_logprob_diff_mean", "max_logprob_diff_share", *added):
        if whole["rollout"]:
            del whole["rollout"][key]
    assert digest(whole) == WHOLE[stored.name]
    changed = job.model_copy(update={"train": job.train.model_copy(update={"global_batch_sequences": 16})})
    assert fingerprint(changed) != fingerprint(job)
    assert fingerprint(job, "data.partitions") == fingerprint(loads(json.dumps(job.model_dump())), "data.partitions")


def test_a_fingerprint_of_a_renamed_key_has_its_first_name():
    job = loads(SFT)
    said = json.dumps(
        {"data.lanes": job.data.partitions, "train.rows": job.train.global_batch_sequences}, sort_keys=True
    )
    assert (
        fingerprint(job, "data.partitions", "train.global_batch_sequences")
        == hashlib.sha256(said.encode()).hexdigest()[:16]
    )
