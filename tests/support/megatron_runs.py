"""Trainings of Megatron-Core's GPTModel with its own data, tensor and pipeline parallelism and optimizers, on the CPU by gloo.

Megatron asks for CUDA's current device and random state, and makes a few small tensors there. On this machine all of that is the CPU's:
nothing else of Megatron or torch is replaced.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core import parallel_state as groups
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import random as generators
    from megatron.core.transformer import TransformerConfig
    from megatron.training import arguments, checkpointing, global_vars

    from async_ckpt.integrations import megatron as ours

logging.root.handlers.clear()  # the import has added one that writes to standard output

WORDS, LENGTH, BATCHES = 64, 8, 4


class OnCpu(TorchFunctionMode):
    """What is to be made on CUDA is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args = ["cpu" if _is_cuda(one) else one for one in args]
        made = func(*args, **{name: "cpu" if _is_cuda(one) else one for name, one in (kwargs or {}).items()})
        # Its optimizers take no others than CUDA's tensors, by this name.
        return made.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and isinstance(made, str) else made


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


def begin_on_cpu() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.set_device = lambda *_: None
    cuda.current_stream = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    generators._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    OnCpu().__enter__()
    # It fills the steps of torch's Adam, which is here in place of the fused one, from parts that its checkpoints do not have.
    fill = DistributedOptimizer._set_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, parameter, parts: fill(
        self, parameter, {"step": None, **parts}
    )


class Training:
    """A training of four layers with SwiGLU. `optimizer` is "plain", or the sharding type of the distributed one."""

    def __init__(
        self, tp: int = 1, pp: int = 1, optimizer: str = "plain", *, seed: int = 0, dropout: float = 0.0
    ) -> None:
        begin_on_cpu()
        groups.initialize_model_parallel(tp, pp)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        config = TransformerConfig(
            num_layers=4, hidden_size=16, num_attention_heads=4, gated_linear_unit=True, use_cpu_initialization=True,
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
            hidden_dropout=dropout, attention_dropout=dropout, bias_activation_fusion=False, bias_dropout_fusion=False,
            masked_softmax_fusion=False, persist_layer_norm=False, gradient_accumulation_fusion=False,
        )  # fmt: skip
        first, last = groups.is_pipeline_first_stage(), groups.is_pipeline_last_stage()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = GPTModel(
                config, get_gpt_layer_local_spec(), WORDS, LENGTH, pre_process=first, post_process=last
            )
            is_spread = optimizer != "plain"
            self.parallel = DistributedDataParallel(
                config, DistributedDataParallelConfig(use_distributed_optimizer=is_spread), self.model
            )
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=is_spread), [self.parallel]
            )
        config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, self.parallel.no_sync
        self.metadata = {"dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True)}
        if is_spread:
            self.metadata["distrib_optim_sharding_type"] = optimizer
        self.iteration = 0
        self.losses: dict[int, list[float]] = {}

    def train(self, until: int) -> dict[int, list[float]]:
        """The losses of each iteration, on the last stage."""
        size, rank = groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()
        while self.iteration < until:
            self.parallel.zero_grad_buffer()
            self.optimizer.zero_grad()
            numbers = range(rank * BATCHES // size, (rank + 1) * BATCHES // size)
            outputs = get_forward_backward_func()(
                forward_step_func=_forward, data_iterator=_batches(self.iteration, numbers), model=[self.parallel],
                num_microbatches=len(numbers), seq_length=LENGTH, micro_batch_size=2, forward_only=False,
            )  # fmt: skip
            self.optimizer.step()
            self.iteration += 1
            self.losses[self.iteration] = [float(output["loss"]) for output in outputs]
        return self.losses

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """What Megatron-LM's training loop saves: model, optimizer, random states and plain values."""
        state = {"model": self.model.sharded_state_dict(metadata=self.metadata)}
        optimizer = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=self.metadata)
        tp, pp = groups.get_tensor_model_parallel_world_size(), groups.get_pipeline_model_parallel_world_size()
        place = groups.get_pipeline_model_parallel_rank(), groups.get_tensor_model_parallel_rank()
        rng = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
        return {
            **state,
            "optimizer": optimizer,
            f"rng-{tp}-{pp}": ShardedObject(
                f"rng-{tp}-{pp}", [rng], (pp, tp), place, replica_id=groups.get_data_parallel_rank()
            ),
            "iteration": self.iteration,
        }

    @torch.no_grad()  # Megatron copies into views of its fp32 parameters
    def take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["iteration"]
        self.set_steps()
        for rng in (value for name, value in state.items() if name.startswith("rng-")):
            torch.set_rng_state(rng[0]["torch"])
            tensor_parallel.get_cuda_rng_tracker().set_states(rng[0]["tracker"])

    def set_steps(self) -> None:
        """Megatron keeps the number of steps as its fused Adam does. Torch's, which is here instead, has one for each
        parameter.
        """
        for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for of_parameter in one.optimizer.state.values():
                of_parameter["step"] = torch.tensor(float(self.iteration))

    def save(self, folder: str) -> Any:
        return ours.save_checkpoint(self.state(), folder, self.iteration)

    def load(self, folder: str, *, without: str = "none") -> bool:
        """Load the iteration that the tracker names. Returns whether there is one."""
        found = ours.load_checkpoint(self._to_fill(without), folder)
        if found is not None:
            self.take(found[0])
        return found is not None

    def save_theirs(self, folder: str) -> None:
        dist_checkpointing.save(self.state(), folder)

    def load_theirs(self, folder: str, *, without: str = "none") -> None:
        self.take(dist_checkpointing.load(self._to_fill(without), folder))

    def _to_fill(self, without: str) -> dict[str, Any]:
        self.train(self.iteration + 1)  # Megatron fills no state of torch's Adam that is not there
        state = self.state(is_loading=True)
        self.losses.clear()
        return {name: value for name, value in state.items() if not name.startswith(without)}


class LoopOfMegatronLM:
    """Saves and loads by the functions that the training loop of Megatron-LM calls, as its arguments say; with tensor
    parallelism these ask for a device.
    """

    def __init__(self, training: Training, folder: str) -> None:
        self._training = training
        given = [
            "train.py", "--save", folder, "--load", folder, "--save-interval", "1", "--ckpt-format", "torch_dist",
            "--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4", "--seq-length", f"{LENGTH}",
            "--max-position-embeddings", f"{LENGTH}", "--micro-batch-size", "2", "--global-batch-size", f"{2 * BATCHES}",
            "--train-iters", "5", "--lr", "0.01", "--tokenizer-type", "NullTokenizer", "--vocab-size", f"{WORDS}",
            "--use-distributed-optimizer", "--no-load-rng", "--no-save-rng",
        ]  # fmt: skip
        before, sys.argv = sys.argv, given
        try:
            with redirect_stdout(io.StringIO()):
                global_vars.set_args(arguments.validate_args(arguments.parse_args(), {}))
                init_num_microbatches_calculator(0, None, 2 * BATCHES, 2, groups.get_data_parallel_world_size())
        finally:
            sys.argv = before

    def save(self) -> None:
        training = self._training
        with redirect_stdout(io.StringIO()):
            checkpointing.save_checkpoint(training.iteration, [training.parallel], training.optimizer, None, 0, {})

    @torch.no_grad()
    def load(self) -> None:
        training = self._training
        training.train(training.iteration + 1)  # Megatron fills no state of torch's Adam that is not there
        training.losses.clear()
        with redirect_stdout(io.StringIO()):
            training.iteration, _ = checkpointing.load_checkpoint(
                [training.parallel], training.optimizer, None, checkpointing_context={}
            )
        training.set_steps()


def _batches(iteration: int, numbers: range) -> Iterator[torch.Tensor]:
    for number in numbers:
        draw = torch.Generator().manual_seed(100 * iteration + number)
        yield torch.randint(0, WORDS, (2, LENGTH + 1), generator=draw)


def _forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(batches)
    later = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1], torch.arange(LENGTH).expand(2, LENGTH), later, labels=tokens[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})
