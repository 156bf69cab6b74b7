"""What is measured of a step beside its loss: counts of tokens and rows, speed and memory, over all ranks."""

import time
from collections.abc import Mapping, Sequence

from ptf.compute.meter import peak_flops, peak_memory_gib
from ptf.compute.world import World
from ptf.config import Job
from ptf.data.batch import Batch
from ptf.data.loader import Loader
from ptf.model.flops import Flops
from ptf.model.kernels import matrix_product
from ptf.model.model import Model


class StepMeter:
    """Measures the steps of a run; every rank has one, and they measure together."""

    def __init__(
        self, job: Job, world: World, model: Model, frozen_models: Mapping[str, Model], loader: Loader
    ) -> None:
        self.job, self.world, self.model, self.loader = job, world, model, loader
        self.flops = [Flops.of(model), *map(forward_flops, frozen_models.values())]
        self.peak = self.measured_peak()
        self.said = set[str]()
        # counts, by metric, of jobs that allow samples to be cut or rows to be skipped; tokenized data has them in
        # its manifest instead
        self.counted: dict[str, str] = {}
        if any(source.kind != "tokenized" for source in job.data.sources.values()):
            self.counted |= {"shortened_samples": "truncated"} if job.data.too_long in ("truncate", "split") else {}
            self.counted |= {"bad_rows": "bad"} if job.data.max_bad_rows_share else {}

    def measured(
        self, metrics: dict[str, float], micro: Sequence[Batch], began: float, stopping: bool
    ) -> tuple[dict[str, float], bool]:
        """Add the step's token counts, speed and memory, over all ranks; also return whether any rank is `stopping`."""
        job, world = self.job, self.world
        lengths = [n for batch in micro for n in batch.lengths]
        prefix_lengths = [n for batch in micro for n in batch.prefix_lengths]
        targets = sum(len(batch.trained_positions) for batch in micro)
        slots = sum(batch.tokens.numel() for batch in micro)
        tokens, work, slots = world.sum(
            [sum(lengths), sum(flops.step(lengths, targets, prefix_lengths) for flops in self.flops), slots]
        ).tolist()
        metrics |= {"tokens": tokens, "packing_efficiency": tokens / slots}
        for name in job.data.sources:
            if share := metrics.get(f"source_share/{name}"):
                metrics[f"source_loss/{name}"] /= share
            else:  # the source is the only one, or has no documents in this step
                metrics.pop(f"source_loss/{name}", None)
        without_samples, rows, *counts = world.sum(
            [self.loader.counts[name] for name in ("rows_without_samples", "rows", *self.counted.values())]
        ).tolist()
        metrics["unused_rows_share"] = without_samples / max(1.0, rows)
        metrics |= dict(zip(self.counted, counts, strict=True))
        spent = time.perf_counter() - began
        # the maxima are over all ranks, including those that see the same data
        any_stopping, peak_memory, longest = world.max(
            [float(stopping), peak_memory_gib(world.device), float(max(lengths, default=0))]
        ).tolist()
        if text := self.model.config.beyond(int(longest)):
            self.say_once("a document of", text)
        metrics |= {"tokens_per_s": tokens / spent, **self.mfu(work / spent), "peak_memory_gib": peak_memory}
        return metrics | {"data_wait_s": self.loader.waited_s, "step_s": spent}, any_stopping > 0

    def say_once(self, what: str, rest: str) -> None:
        """Print a line that begins with `what`, once."""
        if self.world.leads and what not in self.said:
            self.said.add(what)
            print(f"train: {what} {rest}", flush=True)

    def measured_peak(self) -> float:
        """Return the FLOP/s that all ranks reach at most."""
        return peak_flops(self.world.device, self.job.train.precision, matrix_product.linear) * self.world.size

    def mfu(self, rate: float) -> dict[str, float]:
        """Return the share of the peak that so many FLOP/s are. If it is above 1, the peak is measured again, because
        others may have used the CPU meanwhile; if it still is, that is an error of ptf's, which is said once."""
        if rate > self.peak:
            self.peak = max(self.peak, self.measured_peak())
        if rate <= self.peak:
            return {"mfu": rate / self.peak}
        self.say_once("mfu", f"is left out: {rate / self.peak:.3f} is above 1, an error of ptf's; please report it")
        return {}


def forward_flops(frozen_model: Model) -> Flops:
    """Count the FLOPs of a forward pass alone."""
    trained = [p for p in frozen_model.parameters() if p.requires_grad]
    frozen_model.requires_grad_(False)
    flops = Flops.of(frozen_model)
    for parameter in trained:
        parameter.requires_grad_(True)
    return flops
