"""The DAGs, and the only package that imports metaflow. Importing it sets the environment that metaflow and Ray read at
their own import."""

import os

DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing calls home: Ray, vLLM, Hugging Face
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

if all(os.environ.get(name) in (None, "", "root") for name in ("METAFLOW_USER", "SUDO_USER", "USERNAME", "USER")):
    os.environ["USERNAME"] = "local"  # metaflow runs for no one called root, who is all there is in a container
