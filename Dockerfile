# The image that tasks and Ray nodes run in: Python, a C compiler (Triton and Inductor compile at run time), wget (KubeRay's probes) and the pins.
#   docker build -t ptf .                                              with CUDA builds
#   docker build -t ptf --build-arg PINS=requirements/cpu.txt .        without
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends build-essential wget && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ptf
SHELL ["/bin/bash", "-c"]
ARG PINS=requirements/gpu.txt
COPY requirements requirements
COPY pyproject.toml README.md Makefile ./
COPY ptf ptf
COPY steps steps
COPY flows flows
COPY configs configs
RUN ./requirements/install.sh "$PINS" && rm -rf /root/.cache && ln -s /opt/ptf/.venv/bin/{python,ray,ptf} /usr/local/sbin/
ENV PATH=/opt/ptf/.venv/bin:$PATH RAY_AUTH_MODE=token PYTHONUNBUFFERED=1
CMD ["ptf", "doctor"]
