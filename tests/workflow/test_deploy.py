"""What is handed to Argo Workflows, and what of ptf goes along."""

import json
import tarfile

import pytest
import yaml

from tests.child import run_python
from tests.data.test_s3 import Server, server  # noqa: F401
from tests.flows.toy import FLOW, ROOT, Toy

pytest.importorskip("kubernetes", reason="needs the package kubernetes, which requirements/ has")
SFT = ROOT / "flows" / "sft_flow.py"
CREATE = ("--datastore", "s3", "argo-workflows", "create", "--only-json")


@pytest.fixture
def toy(tmp_path, server: Server) -> Toy:  # noqa: F811
    toy = Toy(tmp_path)
    address = f"http://127.0.0.1:{server.port}"
    toy.env |= {
        "METAFLOW_DATASTORE_SYSROOT_S3": f"s3://{server.bucket}/metaflow",
        "METAFLOW_S3_ENDPOINT_URL": address,
        "AWS_DEFAULT_REGION": "us-east-1",
        "METAFLOW_ARGO_EVENTS_EVENT": "ptf",
        "METAFLOW_ARGO_EVENTS_EVENT_SOURCE": "ptf",
        "METAFLOW_ARGO_EVENTS_EVENT_BUS": "default",
        "METAFLOW_ARGO_EVENTS_SERVICE_ACCOUNT": "ptf",
        "METAFLOW_ARGO_EVENTS_WEBHOOK_URL": "http://127.0.0.1:9",
    }
    return toy


def test_an_argo_template_has_what_the_config_says(toy):
    raw = yaml.safe_load(FLOW.with_name("toy.yaml").read_text())
    raw["flow"]["stages"]["train"] |= {"gpu": 8, "memory_mib": 9000, "env_vars": {"NCCL_DEBUG": "WARN"}}
    (toy.directory / "job.yaml").write_text(yaml.safe_dump(raw | {"flow": raw["flow"] | {"event": "data.ready"}}))
    done = toy(*CREATE, "--config", "job.yaml", "--set", "train.lr=0.25", flow=SFT)
    assert done.returncode == 0, done.stderr
    template = json.loads(done.stdout)
    assert template["kind"] == "WorkflowTemplate"
    about = template["metadata"]["annotations"]
    assert json.loads(about["metaflow/cron"])["schedule"] == "0 3 * * *"
    assert "data.ready" in about["metaflow/triggers"]
    steps = {one["name"]: one for one in template["spec"]["templates"]}
    assert {"start", "prepare", "tokenize", "train", "evaluate", "publish", "end"} <= steps.keys()
    train = steps["train"]
    given = train["container"]["resources"]
    assert given["limits"]["nvidia.com/gpu"] == "8"
    assert (float(given["requests"]["cpu"]), given["requests"]["memory"]) == (2, "9000.0M")
    assert train["retryStrategy"]["limit"] == 2
    assert train["activeDeadlineSeconds"] == 300
    env = {one["name"]: one.get("value") for one in train["container"]["env"]}
    assert env["NCCL_DEBUG"] == "WARN"
    assert json.loads(env["METAFLOW_FLOW_CONFIG_VALUE"]) == {"config": "kv.config"}, (
        "the pods read what was merged and checked here"
    )
    assert "nvidia.com/gpu" not in steps["prepare"]["container"]["resources"].get("limits", {})
    assert "retryStrategy" not in steps["prepare"]


@pytest.mark.long
def test_our_packages_go_along_and_are_those_that_are_imported(toy):
    listed = toy("package", "list", flow=SFT)
    names = {line.removeprefix(f"{ROOT}/") for line in (listed.stdout + listed.stderr).splitlines()}
    assert {"ptf/recipes/grpo/recipe.py", "steps/stages.py", "flows/base.py", "configs/tiny/sft.yaml"} - names == set()
    saved = toy("package", "save", "package.tgz", flow=SFT)
    assert saved.returncode == 0, saved.stderr
    there = toy.directory / "pod"
    with tarfile.open(toy.directory / "package.tgz") as package:
        package.extractall(there, filter="data")
    modules = "flows.base", "ptf.recipes", "steps.stages"
    code = f"import sys, {', '.join(modules)}; print(*(sys.modules[name].__file__ for name in {modules}))"
    env = toy.env | {"PYTHONPATH": ".:.mf_code"}
    done = run_python("-c", code, cwd=there, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all((there / word).resolve().is_relative_to(there.resolve()) for word in done.stdout.split()), done.stdout
    shown = run_python("sft_flow.py", "show", cwd=there, env=env, timeout=120)
    assert shown.returncode == 0, shown.stderr


def test_a_schedule_that_is_none_is_refused_before_anything_is_made(toy):
    config = str(FLOW.with_name("toy.yaml"))
    done = toy(*CREATE, "--config", config, "--set", "flow.cron=0 25 * * *", flow=SFT)
    assert done.returncode == 2
    assert "flow.cron" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
