"""What is served: a model, where it is, and what its head gives."""

import inspect
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from ptf.compute.world import pick_device
from ptf.config import Job
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.events.catalogue import Catalogue
from ptf.events.prepare import prepare as prepare_events
from ptf.events.serialize import HistorySerializer
from ptf.model import bridge
from ptf.model.components import FILES
from ptf.model.config import DecoderConfig
from ptf.model.layers import LayerFactory
from ptf.model.model_directory import ServedDirectory
from ptf.rl.engines.native import NativeEngine, served_dtype
from ptf.rl.engines.vllm_support import config_of, raise_if_wrong
from ptf.serving.options import LONGEST, ServingOptions
from ptf.serving.ranking import RankService
from ptf.serving.response_service import ResponseService
from ptf.serving.scores import ScoreService, raise_if_not_scalar
from ptf.train.components import layer_factory_of, without_adapters

Service = RankService | ResponseService | ScoreService
EVENTS = ("ptf.events.prepare:prepare", "ptf.events.prepare:generated", "ptf.tasks.shops:prepare")


@dataclass(frozen=True)
class ServedModel:
    """A model that is to be served. `job` and `run` are those it was trained by, if they are known."""

    where: str  # a directory, a URI or a Hugging Face id
    name: str  # under which clients ask for it
    job: Job | None = None
    run: Path | None = None

    def services(self, options: ServingOptions) -> list[Service]:
        """Load the model and return what it offers. Raises UserError for a model that cannot be served so."""
        directory = ServedDirectory.find(self.where)
        tokenizer = Tokenizer.load(str(directory.tokenizer))
        device = pick_device("auto")
        factory = self._factory(directory)
        if directory.scores or (factory is not None and "head" in factory.replace):
            if scorer := self._scorer(directory, tokenizer, factory, device, options):
                return [scorer]
            _raise_unless_native(options, "heads of your own")
        ranking = self.job.evaluate.ranking if self.job is not None and self.run is not None else None
        catalogue = options.catalogue or (ranking.catalogue if ranking is not None else None)
        if catalogue or directory.adapter:
            _raise_unless_native(options, "rankings and adapters")
        if not (catalogue or tokenizer.hf.chat_template):
            raise UserError(
                f"{self.where} has no chat template, so it cannot answer conversations; ptf chat continues texts"
            )
        if options.engine == "vllm":
            return [self._by_vllm(directory, tokenizer, options)]
        engine = NativeEngine(
            str(directory.base),
            device=device,
            # one that ranks computes in fp32, as its evaluation does
            dtype=torch.float32 if catalogue else served_dtype(directory.base, device),
            version=0,
            factory=factory,
            continuous=True,
            batch=options.max_running,
        )
        directory.fill(engine)
        length = max_length_of(engine.model.config, options)
        services: list[Service] = []
        if catalogue:
            items = Catalogue.load(catalogue)
            items.raise_if_different(tokenizer, "the model's")
            serializer = None
            prepare = self.job.data.prepare if self.job is not None else None
            if prepare is not None and prepare.use in EVENTS:
                defaults = inspect.signature(prepare_events).parameters
                names = ("window", "gaps", "request_time")
                window, gaps, timed = (prepare.args.get(name, defaults[name].default) for name in names)
                serializer = HistorySerializer(items.by_name, window, gaps, 1.0, timed)
            services.append(
                RankService(engine, tokenizer, self.name, items, serializer, beam=options.beam, max_length=length)
            )
        if tokenizer.hf.chat_template:
            services.append(ResponseService(engine, tokenizer, self.name, length, options.max_new_tokens))
        return services

    def _scorer(
        self,
        directory: ServedDirectory,
        tokenizer: Tokenizer,
        factory: LayerFactory | None,
        device: torch.device,
        options: ServingOptions,
    ) -> ScoreService | None:
        """Return the service of a model that scores; None if its head is of the user's own and has `logits`."""
        model = bridge.build(directory.base, head="scalar" if directory.scores else "lm", factory=factory)
        if missing := model.give_weights(directory.base, device):
            raise UserError(f"{directory.base} cannot be served: it has no {', '.join(missing)}")
        if not directory.scores and hasattr(model.head, "logits"):
            return None
        model.to(served_dtype(directory.base, device)).requires_grad_(False).eval()
        _raise_unless_native(options, "models that score")
        if not directory.scores:
            raise_if_not_scalar(model, device, self.where)
        return ScoreService(model, tokenizer, self.name, device, max_length_of(model.config, options))

    def _factory(self, directory: ServedDirectory) -> LayerFactory | None:
        """Return the layer factory of the model, with components of the user's own that its job declares."""
        if self.job is None:
            if beside := [file for file in FILES.values() if (directory.base / file).is_file()]:
                raise UserError(
                    f"{self.where} has components of its own ({', '.join(beside)}), which only its run's job names: "
                    "give the run's directory, or the config whose published version it is"
                )
            return directory.factory()
        spec = self.job.model
        parts = [part for part in (spec.head, *spec.replace.values()) if part is not None]
        if self.run is None and any("prepare:" in str(part.args) for part in parts):
            raise UserError(
                f"{self.name}: model.head reads a file that data.prepare wrote (prepare:…); give the run's directory "
                "in place of the config"
            )
        own = layer_factory_of(without_adapters(spec))
        return directory.factory(own if own.replace else None)

    def _by_vllm(self, directory: ServedDirectory, tokenizer: Tokenizer, options: ServingOptions) -> ResponseService:
        """Start vLLM in this process."""
        from ptf.rl.engines.vllm_engine import VLLMEngine, engine_env

        dtype = "float32" if served_dtype(directory.base, pick_device("auto")) == torch.float32 else "bfloat16"
        raise_if_wrong("--engine", config_of(directory.base), "fp32" if dtype == "float32" else "bf16", synced=False)
        caches = tempfile.TemporaryDirectory(prefix="ptf-serve-", ignore_cleanup_errors=True)
        os.environ.update(engine_env(Path(caches.name)))  # before vLLM is imported
        length = max_length_of(bridge.build(directory.base, head="lm").config, options)
        engine = VLLMEngine(str(directory.base), seed=0, dtype=dtype, max_model_len=length)
        weakref.finalize(engine, caches.cleanup)  # when the process ends, at the latest
        return ResponseService(engine, tokenizer, self.name, length, options.max_new_tokens)


def _raise_unless_native(options: ServingOptions, what: str) -> None:
    if options.engine != "native":
        raise UserError(f"--engine {options.engine} does not serve {what}; use --engine native")


def max_length_of(config: DecoderConfig, options: ServingOptions) -> int:
    """Return the most tokens of a context with its response. Raises UserError for more than the model can read."""
    if options.max_length is not None and options.max_length > config.max_positions:
        raise UserError(f"--max-length {options.max_length}: the model reads {config.max_positions} tokens at most")
    return options.max_length or min(config.max_positions, LONGEST)
