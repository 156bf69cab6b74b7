"""The DAGs; the only package that imports Metaflow. Importing it sets environment variables that Metaflow and Ray read
when they are imported."""

import os

DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry from Ray, vLLM and Hugging Face
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

if all(os.environ.get(name) in (None, "", "root") for name in ("METAFLOW_USER", "SUDO_USER", "USERNAME", "USER")):
    os.environ["USERNAME"] = "local"  # Metaflow does not accept the name root, often the only user in a container
