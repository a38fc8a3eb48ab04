"""Tests of torch that need not pass, by row, and why. Whatever else fails fails the command; so
does one of these that passes."""

_SYNC_BN = "SyncBatchNorm works with GPUs only"
_STREAMS = "asks for the streams and events of a GPU"

#: With torch alone, where a CPU stands in for each GPU. The other rows leave these out.
_BN = "test_DistributedDataParallel_SyncBatchNorm"
_BN_TESTS = "|_2D_Input|_Channels_Last|_No_Affine|_Single_Input_Per_Process|_half"
_BN_TESTS += "|_Diff_Input_Sizes_Running_Value|_Diff_Input_Sizes_gradient"
_OPTIM = "test_ddp_apply_optim_in_backward"
_MIXED = "test_ddp_native_mixed_precision"
_TORCH = {
    **{f"{_BN}{name}": _SYNC_BN for name in _BN_TESTS.split("|")},
    "test_average_parameters": "makes a group of NCCL",
    **{
        f"{_OPTIM}{name}": _STREAMS
        for name in ("", "_grad_as_bucket_view_false", "_ignored_params")
    },
    "test_ddp_device": "compares the devices of a forward pass with GPUs",
    "test_ddp_inference": _SYNC_BN,
    "test_ddp_logging_data_gpu": "compares what DDP logs with GPUs",
    **{
        f"{_MIXED}_{view}grad_as_bucket_view_{none}": _STREAMS
        for view in ("", "no_")
        for none in ("no_set_grad_none", "set_grad_to_none")
    },
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BN,
    "test_sync_bn_logged": _SYNC_BN,
}

#: Where every DDP has a hook, torch's own included.
_ANY_HOOK = {
    "test_ddp_grad_div_uneven_inputs": "divide_by_initial_world_size=False is for DDP's own average; a hook divides by the number of ranks"
}

EXPECTED = {
    "torch": _TORCH,
    "torch's": _ANY_HOOK,
    "hook": _ANY_HOOK,
    "algorithm": _ANY_HOOK,
    "lossless": _ANY_HOOK
    | {
        "test_ddp_profiling_torch_profiler": "counts one all-reduce per bucket in a profile; PowerSGD sends others"
    },
}
