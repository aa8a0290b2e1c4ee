"""Training on samples in slices, for programs that have a model of Megatron's and a loop of their own."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

from megatron_epp.data.batch import OF_TOKENS, InputColumns
from megatron_epp.data.iterator import PlannedBatches, samples_in
from megatron_epp.data.samples import Samples, TokenSample, columns_of
from megatron_epp.features import Asked, targets
from megatron_epp.features.losses.sample_report import RankReport, SampleReport, by_sample
from megatron_epp.features.losses.stage_loss import LossStage
from megatron_epp.losses import Average, Loss, NextToken, Scope, load_loss
from megatron_epp.losses.loss import checked_loss
from megatron_epp.mcore.iteration.base_run import NOTHING_TRAINS
from megatron_epp.mcore.iteration.document_schedule import finish_batch, run_batch, warn_and_clear_untrained
from megatron_epp.mcore.iteration.sliced_run import SlicedRun
from megatron_epp.mcore.iteration.wrap import arguments_of, flags_of
from megatron_epp.mcore.model.adopt_built import adopt_built, refusal
from megatron_epp.mcore.model.language_model import axes_of, language_model_of
from megatron_epp.mcore.model.own_inputs import InputChunk, OwnInputs
from megatron_epp.mcore.model.replayed_routes import routed_layers, routing_of
from megatron_epp.mcore.start.sliced_start import new_run
from megatron_epp.plan import EppError, Plan
from megatron_epp.plan.errors import reason_of
from megatron_epp.plan.spans import refuse_forced_cuts
from megatron_epp.runtime.links.objects import AgreedError, from_each_of_job, raise_for

logger = logging.getLogger(__name__)

SETTINGS = (
    *("planner", "memory_cap_gb", "fragmentation_share", "chunk_tokens", "slices", "recompute", "recompute_modes", "offload"),
    *("host_memory_gb", "split_weight_gradient", "costs", "fp32_kv_gradients", "loss_block_tokens", "warm_up"),
    *("wait_limit_seconds", "report_dir", "trace", "allow_unknown_megatron"),
)
"""Flags of training, by their names behind ``--epp-``, that apply to samples of another program."""

_FIXED = {"epp_microbatches": "plan", "epp_latents": "off", "save": None, "load": None, "gradient_accumulation_fusion": False}
"""Flags that samples of another program do not choose: they run in slices, and nothing is saved or loaded by itself."""

_CHECKED_PARAMETERS = 8
"""Number of parameters whose gradients a call looks at before it adds to them."""


class _Planned(NamedTuple):
    digest: bytes
    dataset: Samples
    batches: PlannedBatches


@dataclass(slots=True)
class _Unfinished:
    """Calls whose gradients are neither reduced nor divided.

    Attributes:
        divisor: number of tokens, sequences or groups of these calls, over all replicas.
        num_tokens: what Megatron divides by, on the rank that has it; None if there are no such calls.
        versions: `_versions` of the gradients that they have left.
    """

    divisor: int = 0
    num_tokens: torch.Tensor | None = None
    trains: bool = False
    versions: tuple[int | None, ...] = ()


class SampleSchedule:
    """Function that trains a model on a batch of samples in slices. See `wrap_samples`."""

    def __init__(self, loss: Loss, flags: dict[str, Any], own_inputs: OwnInputs | None = None) -> None:
        self.loss, self._asks, self._flags = loss, columns_of(loss), flags
        self._own_inputs, self._of_inputs = own_inputs, OF_TOKENS
        self._run: SlicedRun | None = None
        self._models: list[torch.nn.Module] = []
        self._ahead: dict[tuple[bytes, bool], _Planned] = {}
        self._unfinished = _Unfinished()

    def plan_ahead(self, *, model: Any, samples: Sequence[Mapping[str, Any]], forward_only: bool = False) -> None:
        """Plan the samples of a later call in the background, while other calls or the program run. A collective call.

        Raises:
            EppError: the model or a sample is not as it must be. What planning raises is raised by that call.
        """
        planned = self._planned(self._attached(model), samples, forward_only)
        self._ahead[planned.digest, forward_only] = planned

    def __call__(
        self,
        *,
        model: Any,
        samples: Sequence[Mapping[str, Any]],
        forward_only: bool = False,
        last: bool = True,
        wants_logprobs: bool = False,
        wants_values: bool = False,
    ) -> SampleReport:
        """Add the gradient of the samples' loss to the model's gradients, and finish these. A collective call of all ranks.

        Args:
            samples: the whole batch, the same on every rank; replicas share it. Each has a list ``tokens``; ``trained``, 0 or
                1 for each, if not all are trained; the columns of the loss, a number for every token as a label or one for
                all; for a loss over groups its ``group``; and if routers are to replay experts, its ``routes``, ``[tokens,
                layers with experts, experts per token]``, of which the last token's are not read.
            last: reduce gradients, and divide them by the tokens or sequences of this call and of those before it with False,
                as if all were one batch. False only adds; the last call before the optimizer's step is one with True.
            wants_logprobs, wants_values: gather log-probabilities of labels for the report, or the model's values if the loss
                reads these.

        Raises:
            EppError: the model or a sample is not as it must be, there is no plan under the memory cap, the loss of a token is
                not finite, or there are gradients that an earlier call has finished.
        """
        wanted = wants_logprobs or wants_values
        if (wants_logprobs and self._asks.has_values) or (wants_values and not self._asks.has_values):
            there = "values" if self._asks.has_values else "logprobs"
            raise EppError(f"{self.loss.name} reads {there} of the model: ask for wants_{there}")
        run, models = self._attached(model), self._models
        planned = self._planned(run, samples, forward_only, None if forward_only else self._has_gradients(models))
        try:
            with run.telling_others(unless=EppError):
                batch = next(planned.batches)
        finally:
            planned.batches.close()
        stage = run.stages.get(run.placement.num_stages - 1)
        values_of_chunks: list[tuple[int, torch.Tensor]] = []
        config, divisor = get_model_config(models[0]), self._divisor(planned.dataset) + self._unfinished.divisor
        # Megatron divides losses per token by their number; others by replicas, where they should be by what the average says.
        scale = 1.0
        if not config.calculate_per_token_loss:
            scale = mpu.get_data_parallel_world_size(with_context_parallel=True) / max(1, divisor)
        is_only_call = last and self._unfinished.num_tokens is None
        if isinstance(stage, LossStage):
            stage.loss.scale = scale if is_only_call else 1.0
            stage.loss.keeps = values_of_chunks if wanted else None

        def finish(num_tokens: torch.Tensor) -> None:
            earlier = self._unfinished
            num_tokens = num_tokens if earlier.num_tokens is None else num_tokens + earlier.num_tokens
            self._unfinished = _Unfinished(divisor, num_tokens, batch.trains or earlier.trains)
            if not last:
                return
            run.finish_gradients(models, num_tokens, None, False)
            if not is_only_call and scale != 1.0:
                for gradient in _gradients(models):
                    if gradient is not None:
                        gradient.mul_(scale)
            if not self._unfinished.trains:
                warn_and_clear_untrained(run, models, config, batch)
            self._unfinished = _Unfinished()

        problems = list[str]()
        loss, report = run_batch(run, models, batch, forward_only, finish, problems.append, reduces=last)
        own = None
        if stage is not None and stage.loss_report is not None and mpu.get_tensor_model_parallel_rank() == 0:
            own = RankReport(stage.loss_report.tolist(), by_sample(batch, values_of_chunks), problems)
        finish_batch(run, batch, loss, report, forward_only)
        if not (forward_only or last):
            self._unfinished.versions = _versions(models)
        assert batch.plan is not None  # of `run_batch`
        return self._report(batch.plan, own, len(planned.dataset) if wanted else 0)

    def close(self) -> None:
        for planned in self._ahead.values():
            planned.batches.close()
        self._ahead.clear()
        if self._run is not None:
            self._run.close()
        self._run = None

    def _attached(self, model: Any) -> SlicedRun:
        models = model if isinstance(model, list) else [model]
        if self._run is not None:
            if models != self._models:
                raise EppError("a schedule of samples is of one model: call wrap_samples again for another")
            return self._run
        config, inside = get_model_config(models[0]), [*map(language_model_of, models)]
        longest = max(from_each_of_job(max(int(getattr(model, "max_sequence_length", 0) or 0) for model in inside)))
        args = arguments_of(models, self._flags | _FIXED | {"seq_length": longest})
        raise_for(from_each_of_job(next(filter(None, (refusal(model, self.loss.average) for model in models)), "")))
        for model in models:
            adopt_built(model, args)
        for adopt in targets(Asked(args), "built"):
            adopt(inside, args)
        run = new_run(args)
        run.loss, run.own_inputs = self.loss, self._own_inputs
        own = max(map(axes_of, inside)), [layer for model in inside for layer in routed_layers(model.decoder)]
        axes, layers = zip(*from_each_of_job(own), strict=True)
        names = None if self._own_inputs is None else self._own_inputs.names
        self._of_inputs = InputColumns(names, max(axes), routing_of(config, chain.from_iterable(layers)))
        with run.telling_others(unless=AgreedError):
            run.attach(models, config)
        self._run, self._models = run, models
        return run

    def _planned(
        self,
        run: SlicedRun,
        samples: Sequence[Mapping[str, Any]],
        forward_only: bool,
        has_gradients: bool | None = None,
    ) -> _Planned:
        """Return samples with the plan that is being made, or has been made ahead. A collective call."""
        dataset, digest = self._agreed(samples, run, has_gradients, forward_only)
        if (count := len(samples_in(dataset))) < run.replicas:
            what = "groups of samples" if self._asks.scope == Scope.GROUP else "samples"
            raise EppError(f"{count} {what} cannot be shared by {run.replicas} replicas: give at least {run.replicas} a call")
        lengths, spans = dataset.lengths.tolist(), [dataset.spans(index) for index in range(len(dataset))]
        if (most := run.args.epp_chunk_tokens) is not None and any(spans):
            with run.telling_others(unless=EppError):  # by the numbers of samples, which shares of replicas do not have
                refuse_forced_cuts(lengths, spans, run.problem.token_multiple, most, "sample")
        if (known := self._ahead.pop((digest, forward_only), None)) is not None:
            known.dataset.take_payloads(dataset)
            return known
        plans, everything = run.plan_source(forward_only, of_batch=True), tuple(range(count))
        return _Planned(digest, dataset, PlannedBatches(dataset, [everything], plans, 1, None, run.replica, run.replicas))

    def _agreed(
        self, samples: Sequence[Mapping[str, Any]], run: SlicedRun, has_gradients: bool | None, forward_only: bool
    ) -> tuple[Samples, bytes]:
        """Check and convert samples; return them and their digest. A collective call: no rank may raise by itself.

        Raises `EppError` on every rank if samples are wrong on some rank, missing or different, something is attached to the
        model that plans would not run, or gradients are finished already (`_has_gradients`; None for a call that adds none).
        Warns if a call that is not `forward_only` trains no parameter.
        """
        dataset, digest, problem = Samples(()), b"", ""
        try:
            asked = run.args.padded_vocab_size, self._of_inputs
            named = [TokenSample.of(sample, self._asks, f"sample {at}", *asked) for at, sample in enumerate(samples)]
            dataset, digest = Samples(named, self._asks), _digest(named)
            problem = "" if named else "there are no samples"
            problem = problem or next(filter(None, (stage.obstacle for stage in run.stages.values())), "")
        except Exception as error:
            problem = reason_of(error)
        trains = any(parameter.requires_grad for model in self._models for parameter in model.parameters())
        of_rank = problem, digest, has_gradients, trains
        problems, digests, with_gradients, training = zip(*from_each_of_job(of_rank), strict=True)
        raise_for(problems)
        if strange := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise EppError(
                f"rank {strange[0]} has other samples than rank 0: every rank gives the whole batch, with equal tokens and "
                "columns in the same order, and this package divides it over replicas"
            )
        if not (forward_only or any(training)) and dist.get_rank() == 0:
            logger.warning(NOTHING_TRAINS)
        if has_gradients is None:
            return dataset, digest
        if not any(with_gradients):
            self._unfinished = _Unfinished()  # the program has given such calls up, and zeroed their gradients
        elif self._unfinished.num_tokens is None:
            raise EppError(
                "the model has gradients, which Megatron has reduced and divided, and would again with this call's: zero them "
                "before it, or pass last=False to all calls before an optimizer's step but the last one"
            )
        return dataset, digest

    def _has_gradients(self, models: Sequence[torch.nn.Module]) -> bool | None:
        """Return whether a model has gradients; None if the program finishes them by itself, so that calls may add to any.

        After unfinished calls it has, until the program writes to them. Else only the smallest are read, since all take long.
        """
        if get_model_config(models[0]).finalize_model_grads_func is None:
            return None
        if self._unfinished.versions and self._unfinished.versions == _versions(models):
            return True
        largest = [x.abs().amax().float() for x in _gradients(models)[:_CHECKED_PARAMETERS] if x is not None and x.numel()]
        return bool(torch.stack(largest).amax() != 0) if largest else False

    def _divisor(self, dataset: Samples) -> int:
        counts = dataset.num_trained()
        if self.loss.average is Average.TOKENS:
            return sum(counts)
        if self.loss.average is Average.GROUPS:
            return sum(any(counts[index] for index in group) for group in dataset.groups)
        return sum(count > 0 for count in counts)

    def _report(self, plan: Plan, own: RankReport | None, count: int) -> SampleReport:
        """Exchange what the ranks with the loss report, with log-probabilities of so many samples.

        Raises `EppError` on every rank, with gradients zeroed, if the loss of a token is not finite.
        """
        of_ranks = [report for report in from_each_of_job(own) if report is not None]
        if problem := "; ".join(dict.fromkeys(chain.from_iterable(report.problems for report in of_ranks))):
            for model in self._models:
                getattr(model, "zero_grad_buffer", model.zero_grad)()
            self._unfinished = _Unfinished()
            raise EppError(f"{problem}. Gradients are zeroed; check where these values come from, or leave the token out")
        return SampleReport.of(self.loss, plan, of_ranks, count)


def _gradients(models: Sequence[torch.nn.Module]) -> list[torch.Tensor | None]:
    trained = sorted((p for model in models for p in model.parameters() if p.requires_grad), key=torch.Tensor.numel)
    return [getattr(p, "main_grad", p.grad) for p in trained]


def _versions(models: Sequence[torch.nn.Module]) -> tuple[int | None, ...]:
    """Return how often each gradient has been written to, as torch counts; None where there is none."""
    return tuple(None if gradient is None else gradient._version for gradient in _gradients(models))


def _digest(samples: Sequence[TokenSample]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        by_name: tuple[Mapping[Any, np.ndarray], ...] = sample.columns, sample.inputs, sample.routes
        of_names = (values[name] for values in by_name for name in sorted(values))
        arrays = [sample.tokens, *(x for x in (sample.trained, sample.positions) if x is not None), *of_names]
        absent = sample.trained is None, sample.positions is None
        digest.update(repr((sample.group, sample.spans, absent, [x.shape for x in arrays])).encode())
        for values in arrays:
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.digest()


def wrap_samples(
    *,
    loss: Loss | str | None = None,
    inputs: Callable[[InputChunk], Any] | None = None,
    input_columns: Sequence[str] = (),
    feature_layers: Sequence[int] = (),
    share_prefixes: bool | None = None,
    **settings: object,
) -> SampleSchedule:
    """Return a function that trains a model on samples in slices, with a loss of the caller's.

    Megatron's parallel state is initialised and the model is built and wrapped before its first call, which adopts the model:
    within a call attention is this package's, elsewhere the model runs as before.

    Args:
        loss: a loss (`megatron_epp.losses.Loss`), or ``module:name`` of one; by default cross entropy of the next token.
        inputs: makes the input rows ``[tokens, 1, hidden]`` of a chunk (`InputChunk`) on the first stage; by default the
            model's embedding does. Samples may have ``spans`` then.
        input_columns: names of samples' columns that `inputs` reads, with a row for every token as an input.
        feature_layers: layers of the first stage, from 0, to whose outputs features are added, which `inputs` then returns
            behind the rows: a pair of rows and a list of as many tensors ``[tokens, 1, hidden]``.
        share_prefixes: run what samples begin with in common once, such as a prompt of several responses. By default where the
            model allows it and it is planned to be faster; True for always, False for every sample by itself.
        settings: flags of training by their names behind ``--epp-``, as ``memory_cap_gb=60``: those of `SETTINGS`.

    Raises:
        EppError: there is no such setting, value or loss.
    """
    sharing = {None: "auto", True: "on", False: "off"}[share_prefixes]
    flags = flags_of("wrap_samples", settings, SETTINGS) | {"epp_share_prefixes": sharing}
    for name, values in (("input_columns", input_columns), ("feature_layers", feature_layers)):
        if inputs is None and values:
            raise EppError(
                f"{name} {', '.join(map(str, values))} are for a function of inputs, and there is none: pass inputs="
            )
    own = None if inputs is None else OwnInputs(inputs, tuple(input_columns), tuple(feature_layers))
    loss = NextToken() if loss is None else loss
    checked = load_loss(loss) if isinstance(loss, str) else checked_loss(loss, f"loss {type(loss).__name__}")
    return SampleSchedule(checked, flags, own)
