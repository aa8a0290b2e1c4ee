"""Careless mistakes in flags, YAML and settings of `wrap` are refused before a run starts, with what a user needs to know.

By who made the mistake (the door), a row says what it was, the number of processes, and what the refusal must hold: the name of
the setting, the number that is wrong, and what to do instead. Words between them may change.
"""

import functools
import json
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.training import arguments, training

from megatron_epp import wrap
from megatron_epp.launch.yaml_settings import Settings
from megatron_epp.mcore import entry
from megatron_epp.mcore.arguments import start
from megatron_epp.mcore.data.prepare import prepare
from megatron_epp.mcore.iteration import wrap as wrapping
from megatron_epp.mcore.patches import environment, install
from megatron_epp.plan import EppError
from megatron_epp.tools.cli.train import checked_argv
from tests.support.mcore.jobs.frameworks import refusal
from tests.support.mcore.launch import TINY

PLAIN = [flag for flag in TINY if flag != "--mock-data"]
FLAGS = ["--vocab-size", "257", *shlex.split("--micro-batch-size 1 --train-iters 20 --split 100,0,0")]
MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0, "seq_length": 32}
MODEL |= {"max_position_embeddings": 32, "lr": 1e-3, "train_iters": 20, "micro_batch_size": 1, "global_batch_size": 8}
MODEL |= {"transformer_impl": "local", "tokenizer_type": "NullTokenizer", "vocab_size": 257, "data_path": "corpus"}
MODEL |= {"eval_iters": 0}
megatron_parser = functools.cache(entry.megatron_parser)


class Doors:
    """The ways in which a user gives settings; each returns what is told, empty if nothing is refused."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def documents(self, flags: str, processes: int = 1, *, is_planned: bool = True) -> str:
        words = words_of(self.folder, f"{'--epp' * is_planned} {flags}")
        self.monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
        parser = entry.megatron_parser() if "--yaml-cfg" in words else megatron_parser()  # a file's values become its defaults
        if not is_planned:
            return refusal(lambda: arguments.validate_args(parser.parse_args(words)))
        return refusal(lambda: entry.check_start(entry.check(parser, words), processes, wants_files=True))

    def user(self, flags: str, processes: int = 1) -> str:
        return self.documents(f"--epp-microbatches user {flags}", processes)

    def without_epp(self, flags: str, processes: int = 1) -> str:
        return self.documents(flags, processes, is_planned=False)

    def launcher(self, changes: dict[str, Any], processes: int = 1) -> str:
        """YAML of `megatron-epp train`, before anything starts."""
        settings = Settings(megatron=MODEL | changes.get("megatron", {}), epp=changes.get("epp", {}))
        return refusal(lambda: checked_argv(settings, processes, wants_files=False))

    def yaml_cfg(self, changes: object, processes: int = 1) -> str:
        path = self.folder / "settings.yaml"
        path.write_text(yaml.safe_dump(changes))
        return self.documents(f"--yaml-cfg {path}", processes)

    def wrap(self, settings: dict[str, Any], processes: int = 1) -> str:
        return refusal(lambda: wrap(**settings))

    def built(self, config: dict[str, Any], processes: int = 1) -> str:
        self.monkeypatch.setattr(wrapping, "get_model_config", lambda model: Namespace(**config))
        models: Any = [Namespace(ddp_config=Namespace(**config.get("ddp_config", {})))]
        refused = refusal(lambda: wrapping.arguments_of(models, {"epp_order": "planned"}))
        assert "--" not in refused  # a script gives settings, not flags
        return refused


def with_documents(folder: Path) -> Path:
    (folder / "text.txt").write_text("a document\n" * 20)
    prepare([folder / "text.txt"], folder / "text")
    return folder


def words_of(folder: Path, flags: str) -> list[str]:
    return [*PLAIN, *FLAGS, "--data-path", str(folder / "text"), *shlex.split(flags.replace("FOLDER", str(folder)))]


@pytest.fixture
def doors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Doors:
    return Doors(folder, monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared documents, a file where a folder should be, and a folder of weights that are not Megatron's."""
    folder = with_documents(tmp_path_factory.mktemp("documents"))
    (folder / "file").touch()
    for name in ("weights", "empty"):
        (folder / name).mkdir()
    (folder / "weights" / "config.json").touch()
    (folder / "weights" / "model.safetensors").touch()
    return folder


FLEX = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex"
PER_STAGE, PER_RANK = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
RETAIN = "--save FOLDER/run --save-retain-interval 6"
TP, PP3 = "--tensor-model-parallel-size", {"pipeline_model_parallel_size": 3}
PP, LAYERS, BATCH = "--pipeline-model-parallel-size", "--num-layers", "--global-batch-size"
WITHOUT_EFFECT = ("--epp-recompute 1", "--epp-placement v", "--epp-slices 3", "--epp-planner seq1f1b")
ROUTERS = "moe_router_load_balancing_type"
ROUTER_REPLAY = ("moe_enable_routing_replay", "enable_routing_replay", "use_routing_replay", "use_rollout_routing_replay")
MISTAKES: dict[str, list[tuple[Any, ...]]] = {
    "documents": [
        (f"{PP} 4", 6, "6 processes", f"{PP} 4", "multiple of 4"),
        (f"{PP} 3 --epp-planner 1f1b", 3, f"{LAYERS} 4", f"{PP} 3", "multiple", "--decoder-first-pipeline-num-layers"),
        ("--eval-global-batch-size 6", 4, "--eval-global-batch-size (6) must be divisible", "data_parallel_size (4)"),
        (f"{PP} 0", 1, f"{PP} is 0", "a whole number from 1"),
        (f"{BATCH} 6", 4, f"{BATCH} 6", "4 replicas", "multiple of 4"),
        (f"{PP} 2 {PER_STAGE} 1 {PER_RANK} 2", 2, f"{PER_STAGE}=1", f"{PER_RANK}=2", "No more than one"),
        (f"{PP} 2 {PER_STAGE} 3", 2, "layers per pipeline stage must be divisible", "layers per virtual pipeline stage"),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "pipeline-model-parallel size should be greater than 1"),
        (f"--epp-layout 3,2 {PP} 2", 2, "--epp-layout 3,2", "5", "4"),
        (f"{PP} 2 --pipeline-model-parallel-layout 'Et|tt|tL'", 2, "num_stages=3", f"{PP}=2", "divisible"),
        (f"{PP} 2 {PER_STAGE} 1 --decoder-first-pipeline-num-layers 2", 2, f"use {PER_RANK}"),
        (f"{PP} 2 --account-for-loss-in-pipeline-split", 2, "layers should be divisible by the pipeline-model-parallel size"),
        (f"{PP} 2 --pipeline-model-parallel-layout 'Et|tL'", 2, "--num-layers"),
        (f"{PP} 2 --decoder-first-pipeline-num-layers 1 {PER_RANK} 2", 2, "at first stage", "must be divisible"),
        (f"{TP} 3", 3, "--num-attention-heads (4) must be a multiple", f"{TP} (3)"),
        ("--epp-slices 100", 1, "--seq-length 32", "100 slices", "raise it to 100", "--epp-slices"),
        ("--max-position-embeddings 8", 1, "--max-position-embeddings (8) must be greater", "--seq-length (32)"),
        ("--attention-dropout 0.1", 1, "--attention-dropout 0.1", "set it to 0"),
        ("--window-size 8,8", 1, "--window-size 8,8", "none behind", "N,0"),
        ("--cuda-graph-impl local", 1, "--cuda-graph-impl local", "none"),
        ("--micro-batch-size 4", 1, "--micro-batch-size 4", "set it to 1"),
        ("--recompute-activations", 1, "--recompute-activations", "--epp-recompute"),
        ("--mock-data", 1, "--mock-data", "--data-path"),
        ("--hybrid-layer-pattern D*D*", 1, "--hybrid-layer-pattern D*D*", "sparse attention", "can run"),
        (f"--hybrid-layer-pattern M*M* --mamba-num-heads 6 {TP} 4", 4, "--mamba-num-heads 6", f"{TP} 4"),
        ("--epp-trace 3", 1, "--epp-trace", "--epp-report-dir"),
        ("--epp-host-memory-gb 4 --epp-offload off", 1, "--epp-host-memory-gb", "--epp-offload", "leave"),
        ("--epp-planner milp", 1, "--epp-planner milp", "use --epp-planner greedy"),
        ("--epp-vocab-parallel on", 1, "--epp-vocab-parallel on", f"{PP} 1", "leave out"),
        ("--epp-samples a.jsonl", 1, "--epp-samples", "--data-path", "leave one"),
        ("--epp-loss megatron_epp.losses:NextToken", 1, "--epp-loss", "--epp-samples FILE", "add"),
        ("--epp-batch-tokens 64 --train-samples 80", 1, "--epp-batch-tokens", "--train-samples 80", "iterations"),
        ("--epp-slics 4", 1, "--epp-slics", "did you mean '--epp-slices'"),
        ("--data-path no/where", 1, "no/where.idx", "--data-path"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /no/where", 1, "--tokenizer-model", "/no/where"),
        ("--save FOLDER/file/run --save-interval 5", 1, "--save FOLDER/file/run", "a file", "choose another"),
        ("--save FOLDER/run", 1, "requires --save-interval is not None"),
        ("--finetune --load FOLDER/weights", 1, "--load", "FOLDER/weights", "Hugging Face", "convert"),
        ("--min-lr 0.1", 1, "requires --min-lr <= --lr (--min-lr 0.1, --lr 0.001)"),
        ("--lr-warmup-iters 20", 1, "--lr-warmup-iters 20", "--train-iters 20", "lower"),
        ("--train-iters 0", 1, "--train-iters", "missing"),
        ("--eval-interval 0", 1, "--eval-iters 1", "--eval-interval", "--eval-iters 0"),
        ("--lr-decay-style WSD", 1, "--lr-decay-style WSD", "--lr-wsd-decay-iters", "add it"),
        (f"{RETAIN} --save-interval 4", 1, "requires --save-retain-interval %", "--save-retain-interval 6, --save-interval 4"),
        ("--seed 0", 1, "--seed 0", "1 or more"),
        ("--wandb-project a", 1, "--wandb-project", "--wandb-exp-name", "add it"),
        ("--overlap-param-gather", 1, "--overlap-param-gather only supported with distributed optimizer"),
        ("--weight-decay-incr-style linear", 1, "requires --start-weight-decay is not None"),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model a/b.model", 1, "--tokenizer-model", "no file a/b.model"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ./where", 1, "--tokenizer-model", "no folder ./where"),
        ("--pretrained-checkpoint FOLDER/nowhere", 1, "--pretrained-checkpoint", "no folder FOLDER/nowhere"),
        ("--finetune --load FOLDER/nowhere", 1, "--load", "no folder FOLDER/nowhere"),
        ("--exit-on-missing-checkpoint --load FOLDER/nowhere", 1, "--load", "no folder FOLDER/nowhere"),
        ("--finetune --load FOLDER/empty", 1, "--load", "no checkpoint in FOLDER/empty", "latest_checkpointed_iteration.txt"),
        ("--pretrained-checkpoint FOLDER/weights", 1, "--pretrained-checkpoint", "Hugging Face", "convert"),
        ("--fp8-format hybrid --fp8-recipe tensorwise", 1, "--fp8-format hybrid", "Transformer Engine", "leave it out"),
        (FLEX, 2, "flex by deepep needs deep_ep, which is not installed"),
        (f"{FLEX} --moe-flex-dispatcher-backend hybridep", 2, "flex by hybridep needs deep_ep, which is not installed"),
        ("--tensorboard-dir FOLDER/file/below", 1, "--tensorboard-dir", "FOLDER/file is a file, not a folder"),
    ],
    "user": [
        ("--cuda-graph-impl local", 1, "--cuda-graph-impl local", "leave it out"),
        (" ".join(WITHOUT_EFFECT), 1, "--epp-microbatches user", "leave out", *WITHOUT_EFFECT),
        ("--epp-order given --epp-offload", 1, "--epp-offload on", "--epp-order given", "leave it out"),
        ("--min-lr 1", 1, "--min-lr 1.0, --lr 0.001"),
        (FLEX, 2, "flex by deepep needs deep_ep, which is not installed"),
    ],
    "without_epp": [
        ("--epp-slices 4", 1, "--epp-slices does", "without --epp", "add it", "leave it out"),
        ("--epp-costs learn --epp-slices 4", 1, "--epp-slices, --epp-costs do", "without --epp", "leave them out"),
        ("--epp-costs=analytic", 1, "--epp-costs", "without --epp", "add it", "leave it out"),
    ],
    "launcher": [
        ({"megatron": {"pipeline_model_parallel_size": 4}}, 6, "6 processes", f"{PP} 4", "multiple of 4"),
        ({"megatron": PP3, "epp": {"planner": "1f1b"}}, 3, f"{LAYERS} 4", f"{PP} 3", "multiple"),
        ({"epp": {"slics": 4}}, 1, "slics", "did you mean 'slices'"),
        ({"megatron": {"position_embedding_type": "ropes"}}, 1, "argument --position-embedding-type: invalid choice: 'ropes'"),
        ({"megatron": {"min_lr": 0.1}, "epp": {"enabled": False}}, 1, "--min-lr 0.1, --lr 0.001"),
        ({"megatron": {"train_iters": 0}, "epp": {"enabled": False}}, 1, "--train-iters", "missing"),
    ],
    "yaml_cfg": [
        ({"language_model": {"qk_clip": True}}, 1, "--qk-clip", "leave it out"),
        ({"num_layers": "many"}, 1, "--num-layers", "'many'", "settings.yaml"),
        ({"position_embedding_type": "ropes"}, 1, "invalid choice: 'ropes'"),
        ({"swiglu": 3}, 1, "swiglu is 3; --swiglu is a switch: give true or false"),
        ({"num_layers": [1, 2]}, 1, "--num-layers takes one value"),
        ([1, 2], 1, "holds no `name: value` pairs"),
        ({"language_model": 5}, 1, "`language_model:` holds 5; it must hold names with values"),
        ({"megatron": {"num_layers": 4}}, 1, "settings.yaml", "`megatron:`", "megatron-epp train -c"),
        ({"data_path": "${UNSET}"}, 1, "settings.yaml", "data_path is ['${UNSET}'], with a variable that is not set"),
    ],
    "wrap": [
        ({"host_memory_gb": 4, "offload": "off"}, 1, "host_memory_gb=4", "offload='off'", "leave one"),
        ({"slices": 4}, 1, "slices=4", "leave out"),
        ({"slices": 0}, 1, "slices=0", "leave out"),
        ({"order": "given", "split_weight_gradient": True}, 1, "split_weight_gradient=True", "order='given'", "leave it out"),
        ({"order": "given", "offload": "on"}, 1, "offload='on'", "order='given'", "leave it out"),
        ({"order": "given", "host_memory_gb": 3}, 1, "host_memory_gb=3", "order='given'", "leave it out"),
        ({"offload": 2}, 1, "offload is 2", "auto, on, off"),
        ({"memory_cap": 4}, 1, "memory_cap", "did you mean 'memory_cap_gb'"),
        ({"order": "mine"}, 1, "order", "'mine'", "planned, given"),
    ],
    "built": [
        ({"cuda_graph_impl": "local"}, 1, "cuda_graph_impl='local'", "leave it out"),
        ({"overlap_moe_expert_parallel_comm": True}, 1, "overlap_moe_expert_parallel_comm=True", "leave it out"),
        ({"fp8": "hybrid"}, 1, "fp8_recipe='delayed' (its amax histories advance with every chunk"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8", "fp8_param": True}, 1, "fp8_param=True"),
        ({"fp4": "e2m1"}, 1, "fp4='e2m1'"),
        ({"ddp_config": {"num_distributed_optimizer_instances": 2}}, 1, "num_distributed_optimizer_instances=2"),
        ({"ddp_config": {"use_megatron_fsdp": True}}, 1, "use_megatron_fsdp=True"),
        ({"dsa_indexer_topk_freq": 2}, 1, "dsa_indexer_topk_freq=2"),
        ({"tensor_model_parallel_size": 2, "gtp_weight_remat_size": 2}, 1, "num_weight_shards=4 on 2 tensor-parallel ranks"),
        ({ROUTERS: "global_aux_loss"}, 1, f"{ROUTERS}='global_aux_loss'", "replicas have plans", "use aux_loss"),
        ({ROUTERS: ["aux_loss", "global_aux_loss"]}, 1, f"{ROUTERS}=['aux_loss', 'global_aux_loss']", "use aux_loss"),
        ({"hybrid_context_parallel": True}, 1, "hybrid_context_parallel=True (leave it out"),
        ({"dynamic_context_parallel": True}, 1, "dynamic_context_parallel=True (leave it out"),
        *(({name: True}, 1, f"{name}=True (", "megatron_epp.wrap(order='given')") for name in ROUTER_REPLAY),
    ],
}
ROWS = {f"{door}: {row[0]}": (door, row[0], row[1], row[2:]) for door, rows in MISTAKES.items() for row in rows}
assert len(ROWS) == sum(map(len, MISTAKES.values()))


@pytest.mark.parametrize(("door", "mistake", "processes", "facts"), ROWS.values(), ids=ROWS)
def test_a_mistake_is_refused_with_its_number_and_its_remedy(doors: Doors, door: str, mistake: Any, processes: int, facts: Any):
    refused = getattr(doors, door)(mistake, processes)
    assert refused
    assert [fact for fact in facts if fact.replace("FOLDER", str(doors.folder)) not in refused] == [], refused


def test_what_is_no_mistake_is_not_refused(doors: Doors) -> None:
    settings: dict[str, Any] = {"documents": "", "user": "", "launcher": {}, "wrap": {}, "yaml_cfg": {"lr": 0.5}}
    assert {door: getattr(doors, door)(given) for door, given in settings.items()} == dict.fromkeys(settings, "")


def test_all_mistakes_are_told_at_once(doors: Doors) -> None:
    flags = "--attention-dropout 0.1 --window-size 8,-1 --seed 0 --epp-trace 3 --data-path no/where --vocab-file nowhere.txt"
    refused = doors.documents(flags)
    for fact in ("--attention-dropout 0.1", "--window-size", "--seed 0", "--epp-trace", "no/where.idx", "nowhere.txt"):
        assert fact in refused


class Asked:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def args(self, more: str = "") -> Namespace:
        return entry.check(megatron_parser(), words_of(self._folder, f"--epp {more}"))

    def problems(self, more: str = "", *, wants_files: bool = True, world_size: int = 1) -> list[str]:
        return refusal(lambda: entry.check_start(self.args(more), world_size, wants_files=wants_files)).splitlines()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(with_documents(tmp_path_factory.mktemp("documents")))


def test_a_run_that_would_train_is_not_refused(asked: Asked, tmp_path: Path) -> None:
    assert asked.problems() == []
    assert asked.problems(f"--save {tmp_path / 'a' / 'b'} --load {tmp_path / 'a' / 'b'} --save-interval 5") == []
    user = "--epp-microbatches user --load nowhere --finetune --data-path no/where --eval-interval 0 --lr-warmup-iters 20"
    assert asked.problems(user) == []
    flags = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex"
    assert asked.problems(flags, world_size=2, wants_files=False) == []
    (tmp_path / start.TRACKER).write_text("10")
    assert asked.problems(f"--load {tmp_path}") == []


@pytest.mark.parametrize("more", ["", "--epp-allow-unknown-megatron"])
def test_a_run_without_plans_needs_no_flag_of_ours(more: str) -> None:
    entry.check_run(megatron_parser().parse_args([*TINY, *more.split()]), 1)


def test_a_flag_that_is_missing_is_named(asked: Asked) -> None:
    named = "--max-position-embeddings argument is None"
    for missing, says in (("lr", "--lr is missing: pass a learning rate"), ("max_position_embeddings", named)):
        args = asked.args()
        setattr(args, missing, None)
        with pytest.raises(EppError, match=says):
            entry.check_start(args, 1, wants_files=False)


@pytest.mark.parametrize("door", ["", "--epp-microbatches user --eval-interval 0"])
def test_grouped_experts_without_a_gpu_are_shown_and_not_run(asked: Asked, monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    flags = f"{door} --num-experts 4 --moe-grouped-gemm"
    (problem,) = asked.problems(flags)
    assert problem == "--moe-grouped-gemm needs a GPU, and torch finds none: leave it out"
    assert asked.problems(flags, wants_files=False) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert asked.problems(flags) == []


def test_where_nothing_is_evaluated_there_needs_to_be_no_interval(asked: Asked) -> None:
    """Megatron divides by it all the same, and ends without one."""
    args = asked.args("--eval-iters 0")
    args.eval_interval = None
    entry.check_start(args, 1, wants_files=False)
    assert args.eval_interval == 20


def test_a_run_asks_on_its_first_rank_before_megatron(asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args, validated = asked.args(f"--tensorboard-dir {tmp_path / 'file' / 'below'}"), []
    args.rank, args.world_size = 0, 1
    (tmp_path / "file").touch()
    with pytest.raises(EppError, match=f"--tensorboard-dir {tmp_path}/file/below: {tmp_path}/file is a file, not a folder"):
        install._check_flags(validated.append, args)
    assert validated == []
    monkeypatch.setenv("RANK", "1")
    install._check_flags(validated.append, args)
    assert validated == [args]


def test_a_folder_that_cannot_be_written_is_named(asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start.os, "access", lambda path, mode: False)
    said = f"--save {tmp_path / 'run'}: the folder {tmp_path} cannot be written; choose another folder"
    assert asked.problems(f"--save {tmp_path / 'run'} --save-interval 5") == [said]


Saves = Callable[..., Path]


@pytest.fixture
def saves(asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Saves:
    """Make a folder with what a checkpoint of a run with flags holds besides tensors, the schedule as Megatron makes it."""

    def save(more: str = "", world_size: int = 1, name: str = "saved") -> Path:
        then, folder = asked.args(more), tmp_path / name
        entry.check_start(then, world_size, wants_files=False)
        then = start.validate(then)
        monkeypatch.setattr(training, "get_args", lambda: then)
        schedule = training.get_optimizer_param_scheduler(torch.optim.SGD([torch.zeros(1)])).state_dict()
        (folder / "iter_0000010").mkdir(parents=True)
        (folder / start.TRACKER).write_text("10")
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / "iter_0000010" / "metadata.json").write_text(json.dumps(about))
        torch.save({"args": then, "opt_param_scheduler": schedule}, folder / "iter_0000010" / "common.pt")
        return folder

    return save


def test_the_flags_of_the_run_that_saved_it_go_on(asked: Asked, saves: Saves) -> None:
    more = "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --min-lr 1e-5 --lr-decay-iters 15"
    assert asked.problems(f"--load {saves()}") == []
    assert asked.problems(f"--load {saves(more, name='other')} {more}") == []


OTHERS = {
    "--train-iters 30": "value 240 and checkpointvalue 160 for total number of iterations",
    "--lr 3e-4": "value 0.0003 and checkpointvalue 0.001 for learning rate",
    "--global-batch-size 16": "for total number of iterations",
    "--lr-warmup-iters 3": "for warmup iterations",
    "--lr-decay-style cosine": "for learning rate decay style",
    "--weight-decay 0.5": "for start weight decay",
    "--min-lr 1e-5": "for minimum learning rate",
}


@pytest.mark.parametrize("more", OTHERS)
def test_another_schedule_than_that_of_the_checkpoint_is_refused_by_its_flags(asked: Asked, saves: Saves, more: str) -> None:
    folder = saves()
    (problem,) = asked.problems(f"--load {folder} {more}")
    assert problem.startswith(f"the checkpoint in {folder} was saved with another schedule of learning rates")
    assert OTHERS[more] in problem
    assert "add --override-opt-param-scheduler" in problem
    for takes in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler", "--finetune", "--no-load-optim"):
        assert asked.problems(f"--load {folder} {more} {takes}") == []


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
def test_layers_no_bridge_exports_are_refused(asked: Asked, saves: Saves, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    folder = saves()
    local, engine = (f"{flag} {folder} --transformer-impl {layers}" for layers in ("local", "transformer_engine"))
    assert asked.problems(local) == []
    (config := folder / "iter_0000010" / "run_config.yaml").touch()
    (problem,) = asked.problems(local)
    assert problem.startswith(f"the checkpoint in {folder} is Megatron-Bridge's, which cannot export")
    assert "set --transformer-impl transformer_engine" in problem
    assert problem.endswith(f"remove {config}")
    monkeypatch.setattr(environment, "_missing", frozenset)  # as if the package were there
    assert asked.problems(engine) == []


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("form", ["", "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"])
def test_optimizer_state_of_experts_of_one_or_more_stays(asked: Asked, saves: Saves, before: int, now: int, form: str) -> None:
    more = f"--num-experts 4 --moe-token-dispatcher-type alltoall --expert-model-parallel-size {{}} {form}"
    folder = saves(more.format(before), world_size=2)
    (problem,) = asked.problems(f"--load {folder} {more.format(now)}", world_size=2)
    assert f"the optimizer state in {folder} was saved with --expert-model-parallel-size {before}" in problem
    assert f"resume with {before}, or begin it anew with --no-load-optim" in problem
    assert asked.problems(f"--load {folder} {more.format(before)}", world_size=2) == []
    assert asked.problems(f"--load {folder} {more.format(now)} --no-load-optim", world_size=2) == []


def test_a_checkpoint_of_another_model_is_refused(asked: Asked, saves: Saves) -> None:
    """Layers that follow from a pattern are not compared before Megatron counts them."""
    folder = saves()
    said = f"the checkpoint in {folder} is of another model: this run has --num-layers 8, not 4"
    assert asked.problems(f"--load {folder} --num-layers 8") == [said]
    args = asked.args(f"--load {folder}")
    args.num_layers = None
    assert list(start._unlike(args, folder)) == []


def test_a_run_without_its_checkpoint_says_so(asked: Asked, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert asked.problems(f"--load {tmp_path / 'nowhere'}") == []
    (record,) = (record for record in caplog.records if "new weights" in record.getMessage())
    assert record.getMessage() == f"--load: there is no folder {tmp_path / 'nowhere'}: training begins with new weights"
