"""The DAGs; the only package that imports Metaflow. Importing it sets environment variables that Metaflow and the
Hub's client read when they are imported."""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # Ray's and vLLM's are off wherever ptf starts them

if all(os.environ.get(name) in (None, "", "root") for name in ("METAFLOW_USER", "SUDO_USER", "USERNAME", "USER")):
    os.environ["USERNAME"] = "local"  # Metaflow does not accept the name root, often the only user in a container
