"""Megatron's parsed flags, as far as `prepare_epp_args` looks at them."""

import argparse

from megatron_epp.mcore.arguments.parser import add_epp_args

MEGATRON = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "timing_log_level": 0, "tp_comm_overlap": False, "add_bias_linear": True,
    "add_qkv_bias": False, "moe_grouped_gemm": False, "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False, "calculate_per_token_loss": True, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "global_batch_size": 48, "moe_pad_expert_input_to_capacity": False,
    "moe_router_load_balancing_type": "aux_loss", "moe_token_dispatcher_type": "alltoall", "delay_wgrad_compute": False,
    "dist_ckpt_optim_fully_reshardable": False, "overlap_grad_reduce": False, "save": None, "use_distributed_optimizer": False,
    "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None, "num_attention_heads": 8,
    "num_experts": None, "num_layers": 8, "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None, "pipeline_model_parallel_layout": None, "pipeline_model_parallel_size": 1,
    "rank": 0, "seq_length": 64, "sequence_parallel": False, "tensor_model_parallel_size": 1, "transformer_impl": "local",
    "world_size": 48,
}  # fmt: skip


def arguments(*epp, **megatron):
    parser = add_epp_args(argparse.ArgumentParser())
    return argparse.Namespace(**(MEGATRON | megatron), **vars(parser.parse_args(["--epp", *epp])))


def data_arguments(**changes):
    """Megatron's parsed arguments as far as the documents of a run are concerned."""
    defaults = {
        "data_path": None, "data_args_path": None, "train_data_path": None, "valid_data_path": None, "test_data_path": None,
        "per_split_data_args_path": None, "split": "80,15,5", "seq_length": 300, "seed": 1234, "mmap_bin_files": True,
        "global_batch_size": 6, "eval_global_batch_size": 4, "eval_iters": 2, "skip_train": False, "epp_documents": "split",
        "eod_mask_loss": False, "tokenizer_type": "NullTokenizer", "vocab_size": 257, "pad_vocab_size": False,
        "consumed_train_samples": 0, "consumed_valid_samples": 0,
    }  # fmt: skip
    return argparse.Namespace(**(defaults | changes))
