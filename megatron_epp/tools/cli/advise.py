"""The command that advises on parallel sizes."""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron_epp.cost.memory import DEVICE_SHARE
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.arguments.parser import add
from megatron_epp.mcore.arguments.table import ROWS
from megatron_epp.plan import is_unlimited
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import AUTO, flag_words
from megatron_epp.plan.reading import brief, brief_text, naming_file, whole
from megatron_epp.plan.units import format_bytes
from megatron_epp.plan.writing import write_text
from megatron_epp.plan.yaml_files import find, shipped
from megatron_epp.planner import Options
from megatron_epp.tools.advice import advice_text
from megatron_epp.tools.advice.configuration_search import advise, check_devices
from megatron_epp.tools.advice.judge import Judged
from megatron_epp.tools.advice.question import Configuration, Question, Sharing
from megatron_epp.tools.cli import planning_flags
from megatron_epp.tools.cli.lengths import PARENTS, SOURCES, drawn, is_distribution, sampled
from megatron_epp.tools.cli.planning_flags import flags_of, of_model
from megatron_epp.tools.cli.terminal import PROGRAM, Parser, add_output, progress, say
from megatron_epp.tools.formulas import Profile
from megatron_epp.tools.formulas.library import check_formulas, load_costs, load_flags
from megatron_epp.tools.report.text import format_us

EXAMPLE = """\
example: Llama 3 8B on 64 H100, documents like Wikipedia's, a recipe for `megatron-epp train`
  megatron-epp advise --model llama3-8b --cluster h100x8 --devices 64 --lengths wikipedia \\
    --context 131072 -o recipe.yaml
the lengths of your own documents, with tensor parallelism left at 2
  megatron-epp advise --model llama3-8b --cluster a100x8 --devices 16 --lengths documents.idx \\
    --tensor-parallel 2
"""
_SIZES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "virtual_stages", "expert_parallel")
"""Settings that are searched unless they are given."""
_NAMES = {name: name.partition("_")[0] for name in _SIZES} | {"expert_tensor_parallel": "expert_tensor"}
"""Fields of `Configuration` by settings of sizes that may be given."""
_FREE = ("num_layers", "loss_block_tokens", "relays_latents")
"""Model settings in which a pipeline may differ from the model that was measured."""


def add_arguments(parser: Parser) -> None:
    machine = parser.add_argument_group("machine")
    add(machine, "devices", required=True, help="devices to use, in all")
    rates = f"YAML of a machine's rates, memory and devices per node; shipped: {', '.join(shipped('clusters'))}"
    add(machine, "cluster", default="h100x8", help=f"{rates} (default: %(default)s)")
    share = f"{100 * DEVICE_SHARE:.0f}%%"
    add(machine, "attention_kernel")
    held = f"what one device may hold, in 2^30 bytes (default: {share} of the cluster's device memory)"
    add(machine, "cap_bytes", help=held)
    batch = parser.add_argument_group("batch", "sequences are drawn from the lengths")
    batch.add_argument("--lengths", required=True, metavar="FILE|N,N,...|NAME", help=SOURCES)
    longest = "the most tokens of a sequence, and one as long must fit (default: the longest length)"
    add(batch, "context", help=longest)
    add(batch, "documents", "global_batch_size")
    add(batch, "seed", help="seed of the draw (default: 0)")
    planning_flags.add_shape(model := parser.add_argument_group("model", "(default: an 8B model)"))
    add(model, *planning_flags.FP8_FLAGS, "latents", default=None)
    planning_flags.add_optimizer(
        parser.add_argument_group("optimizer", "Megatron's flags of its optimizer, which the recipe gets too")
    )
    fixed = parser.add_argument_group("sizes", "searched where they are not given")
    for setting in _SIZES:
        what = ROWS[setting].help.replace("(default: 1).", "(default: searched)")
        add(fixed, setting, dest=setting, help=what[0].lower() + what[1:])
    what = "ranks that share an expert (default: 1, with which the others are neighbours)"
    add(fixed, "expert_tensor_parallel", dest="expert_tensor_parallel", help=what)
    parser.set_defaults(sequence_parallel=False)
    plans = parser.add_argument_group("plans", "as training would make them")
    only = "only its tensor-, context- and expert-parallel sizes are searched then, so repeat it for more of them"
    what = f"a profile of this model that `megatron-epp profile` wrote, in place of formulas; {only} (default: formulas)"
    add(plans, "costs_file", action="append", help=what)
    what = "as in training; auto: left to the plans, where the cluster has a link to host memory (default: auto)"
    add(plans, "offload", help=what)
    add(plans, "split_weight", "vocab_parallel")
    out = parser.add_argument_group("output")
    out.add_argument("--show", type=COUNT, default=5, metavar="N", help="configurations in the table (default: %(default)s)")
    out.add_argument("--all", action="store_true", help="say of every configuration why it loses, not only of the nearest")
    out.add_argument("--json", action="store_true", help="print everything as JSON")
    add_output(out, "write the best as a recipe for `megatron-epp train -c` (default: do not)")


def run(args: argparse.Namespace) -> int:
    question = question_of(args)
    check_devices(question)
    with progress("advising") as note:
        advice = advise(question, note)
    best = advice.best[0]
    if args.json:
        settings = {
            "megatron": advice_text.megatron_settings(question, best.config),
            "epp": advice_text.epp_settings(question, best.config),
        }
        if advice.plain is not None:
            settings["megatron_alone"] = advice_text.stock_settings(question, advice.plain)
        say(json.dumps(advice_text.as_json(advice) | {"settings": settings}, indent=1))
    else:
        say(advice_text.as_text(advice, args.show, args.all))
        if advice.plain is not None and advice.plain_is_as_good:
            own = advice_text.command_text(advice_text.stock_settings(question, advice.plain))
            say("\nFlags of Megatron's own schedule, for rows packed so:\n" + textwrap.indent(own, "  "))
        say("\nFlags of the best plans:\n" + textwrap.indent(advice_text.flags_text(question, best.config), "  "))
        say("\n" + "\n".join([*[advice_text.SHARES] * bool(question.borrowed), *_again(args, question, best)]))
    if args.output:
        is_shipped, plain = args.model in shipped("models") and not Path(args.model).is_file(), advice_text.without_sizes
        model = args.model if is_shipped and plain(load_flags(args.model)) == plain(question.flags) else None
        write_text(args.output, advice_text.recipe_text(question, best.config, model, f"--lengths {brief_text(args.lengths)}"))
    return 0


def _again(args: argparse.Namespace, question: Question, best: Judged) -> Iterator[str]:
    plan, config = best.plan, best.config
    if len(config.lockstep_groups[0]) > 1:
        yield "Replicas that share experts are planned together, which no other command does."
        return
    whose = "The plan of the slowest replica" if config.data > 1 else "Its plan"
    yield f"{whose}, {format_us(plan.predicted.makespan_us)} and {format_bytes(best.peak_bytes)} on its fullest rank, again:"
    yield from (f"  {PROGRAM} {command} {shlex.join(plan_flags(args, question, best))}" for command in ("plan", "memory"))


def plan_flags(args: argparse.Namespace, question: Question, best: Judged) -> list[str]:
    """Return the flags with which `plan` makes the plan of an evaluated configuration, whose replicas share no experts."""
    config, lengths = best.config, [resolve_name(f"{PARENTS}words")(best.plan)]
    if is_distribution(args.lengths) and config.data == 1:
        lengths = [args.lengths, "--batch-size", str(len(question.lengths)), "--documents", question.documents]
    names = *planning_flags.SHAPE_FLAGS, *planning_flags.FP8_FLAGS, *planning_flags.OPTIMIZER_FLAGS, "trained_parameters"
    flags: dict[str, Any] = {(dest := ROWS[name].short_dest): getattr(args, dest) for name in names}
    layout = ("" if config.virtual == 1 else f"{config.placement}:") + ",".join(f"{count:g}" for count in config.layers)
    flags |= {"context": question.context, "cluster": args.cluster, "attention_kernel": args.attention_kernel}
    flags |= {"devices": question.devices, "stages": config.pipeline, "layout": layout}
    flags |= {"tensor_parallel": config.tensor, "context_parallel": config.context}
    flags["expert_parallel"] = config.expert if config.expert > 1 else None
    flags["expert_tensor_parallel"] = config.settings(question.flags).get("expert_tensor_parallel_size")
    flags |= {"sequence_parallel": config.tensor > 1, "data_parallel": config.data}
    flags["token_multiple"] = question.token_multiple(config)
    flags["vocab_parallel"] = "on" if config.shards_vocabulary else "off"
    flags["latents"] = config.latents or question.flags.get("epp_latents")
    flags["offload"] = "on" if question.options.offload else None
    flags["split_weight"] = "on" if question.options.split_weight else "off"
    flags["memory_cap_gb"] = None if is_unlimited(question.cap_bytes) else repr(question.cap_bytes / 2**30)
    flags |= {"seed": args.seed or None, "costs": question.costs_files.get(config.sharing)}
    return ["--lengths", *lengths, *flag_words(flags)]


def question_of(args: argparse.Namespace) -> Question:
    cluster = planning_flags.cluster_of(args)
    assert cluster is not None  # there is a default
    (sample,) = planning_flags.as_trained(args, sampled(args.lengths, args, args.global_batch_size))
    context, batch = args.context or max(sample.lengths), drawn(sample, args.global_batch_size, args.seed)
    flags = flags_of(args)
    with of_model(args):
        check_formulas(flags)
    for name, ranks in (("expert", args.expert_parallel), ("expert-tensor", args.expert_tensor_parallel)):
        if flags.get("num_experts") is None and (ranks or 1) > 1:
            raise EppError(f"--{name}-parallel {ranks} is for a model with --experts: leave it out")
    may_offload = args.offload == "on" or (args.offload == AUTO and bool(cluster.rates.host_bytes))
    question = Question(
        flags=flags,
        cluster=cluster,
        devices=args.devices,
        cap_bytes=planning_flags.cap_of(args.memory_cap_gb, cluster),
        lengths=batch.lengths,
        borrowed=batch.borrowed,
        context=context,
        fixed={field: value for name, field in _NAMES.items() if (value := getattr(args, name)) is not None},
        documents=args.documents,
        opens_weights=args.split_weight == AUTO,
        vocabulary={"off": (False,), "on": (True,), "auto": (False, True)}[args.vocab_parallel],
        options=Options(context=context, offload=may_offload, split_weight=args.split_weight == "on", seed=args.seed),
    )
    measured, files = {}, {}
    for name in args.costs or ():
        sizes, profile = _measured(name, question)
        measured[sizes], files[sizes] = profile, str(find("profiles", name))
    return replace(question, measured=measured, costs_files=files)


def _measured(name: str, question: Question) -> tuple[Sharing, Profile]:
    """Read a profile and the sizes that share a layer in it. Raises `EppError` if it is not of this model."""
    profile = load_costs(name)
    shape = profile.origin.get("shape") if isinstance(profile, Profile) else None
    if not isinstance(profile, Profile) or not isinstance(shape, dict):
        raise EppError(f"--costs {name} does not say of which model it is: measure one with `megatron-epp profile`")
    with naming_file(f"--costs {name}: origin.shape"):
        tensor, context, expert = (whole(shape.get(f"{kind}_parallel", 1), 1) for kind in ("tensor", "context", "expert"))
        sharing = whole(shape.get("expert_tensor_parallel") or (tensor if shape.get("num_experts") else 1), 1)
    shape_here = asdict(question.shape(Configuration(tensor, context, 1, 1, expert, sharing)))
    shape_here["dense_layers"] = list(shape_here["dense_layers"])  # as JSON has them
    for key, value in shape.items():
        if key not in _FREE and value != shape_here.get(key, value):
            here = f"the model here has {shape_here[key]}: measure it, or give the model that was measured"
            raise EppError(f"--costs {name} was measured with {key} {brief(value)}, and {here}")
    return (tensor, context, expert, sharing), profile
