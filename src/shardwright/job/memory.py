"""The ``[memory]`` of a job: how a step is run, as far as that decides what it keeps."""

# A runtime that does not do what a job asks for would be estimated as if it did, and the estimate
# be wrong by whole copies of the model. So stages, offloads and policies that a runtime lacks are
# refused, with the runtime that has them. What a plan decides ("auto") has no value here: whoever
# asks for one without a plan is told so.

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.errors import InputError, expected, not_one_of
from shardwright.core.llama import LossKind
from shardwright.core.megatron import MegatronSettings
from shardwright.core.optimizers import Implementation
from shardwright.core.placement import TwoZeros, Zero

Runtime = Literal["shardwright", "fsdp2", "ddp", "megatron"]
WHOLE: tuple[Runtime, ...] = ("ddp", "megatron")  # every rank has all parameters
ComputeDtype = Literal["bf16", "fp16", "fp32"]
ReduceDtype = Literal["fp32", "bf16", "fp16"]
Offload = Literal["none", "states", "all", "auto"]
Float8 = Literal["tensorwise", "rowwise"]
AttentionKernel = Literal["flash", "eager"]
NormKernel = Literal["fused", "composite"]

# What is kept of a block for its backward. "layers:N" computes every Nth block again as a whole,
# "first:N" the first N of a stage, "save:aten.mm,..." all but the results of these operators.
CHECKPOINTING = ("none", "full", "selective", "selective_op", "core_attention")
POLICIES = (*CHECKPOINTING, "layers:N", "first:N", "save:OPERATOR,...")
Policy = Annotated[str, msgspec.Meta(examples=list(POLICIES))]
# What "selective" keeps of a block: every second product, and what is costly. _scaled_mm: a product
# in fp8, which TorchTitan's policy sees as mm of torchao's tensors
PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::linear", "aten::_scaled_mm"))
# pytorch/torchtitan, op list of its selective checkpointing (2024-2026) without flex attention,
# which is no operator of aten; the CPU's attention stands beside CUDA's
COSTLY = frozenset(
    (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
        "aten::max",
    )
)
_PARAMETRIC = re.compile(r"(layers|first):[1-9][0-9]{0,3}|save:[\w.:, ]+")


class Fsdp2Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How torch's ``FSDPModule`` is set, and which torch's it is, as far as memory knows of it.

    Attributes:
        reduce_scatter_max_input_buffers: units whose inputs of reduce-scatters there are at once,
            by torch's name
        separate_reduce_scatter_group: one communicator more
        holds_all_reduced (what the torch does that is installed): sums over replicas that are not
            the gradients themselves (in another dtype, or of a later microbatch) stay until the
            backward ends (``true``) or until the next unit's are there
    """

    reduce_scatter_max_input_buffers: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 1
    separate_reduce_scatter_group: bool = False
    holds_all_reduced: bool | UnsetType = UNSET


class MemorySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a forward, on which device, under which runtime, in which dtypes.

    Where dtypes are not given the model says them (``job.job.memory_of``), whatever else is.

    Attributes:
        checkpointing (a plan chooses; without a plan ``"none"``): what a block keeps: ``"none"``:
            all that backward needs; ``"full"``: its inputs; ``"selective"`` (``"selective_op"``):
            every second matrix product, attention and what arrives from other ranks;
            ``"core_attention"``: all but what attention keeps inside; ``"layers:N"``: every Nth
            block its inputs alone; ``"first:N"``: the first N of a stage;
            ``"save:aten.mm,..."``: results of these operators
        lowering (by device): ``"cuda"`` or ``"cpu"``: whose kernels decide what is kept
        runtime: ``"shardwright"``, ``"fsdp2"``, ``"ddp"``, ``"megatron"`` (Megatron-LM's data
            parallel)
        zero: what data ranks share, by the stages of ZeRO: 3 all, 2 gradients and optimizer states,
            1 these states alone. ``shardwright`` does each
            ([how](runtime.md#what-is-cut-the-stages-of-zero)), in a plan and in a run, whose units
            are then all shared unless ``[planner.units]`` says otherwise; a step of one backward is
            the same with 1 and 2. ``[2, 3]`` beside ``data_replicate``: gradients and states are
            cut over copies too (HFSDP), in a plan, a run and an estimate without a plan.
            ``"auto"``: [a plan takes](planner.md) the stage that is fastest of those that fit.
            ``fsdp2`` does 3; ``ddp`` and ``megatron`` share nothing by default, with 1 optimizer
            states (``ZeroRedundancyOptimizer``, the distributed optimizer)
        reshard_after_forward: whether full parameters go after forward: the runtime's way,
            ``true``, ``false`` (FSDP's ``SHARD_GRAD_OP``)
        param_dtype, reduce_dtype (what the model says): what is computed in, and what gradients are
            summed in: ``"bf16"``, ``"fp16"``, ``"fp32"``. Without them a llama computes in the
            ``torch_dtype`` (``dtype``) of its ``hf_config``, one of given widths in bf16 on
            accelerators and in fp32 on a CPU, and sums in fp32; a module of your own has the dtypes
            of its parameters, and sums in fp32 where ``param_dtype`` is named. No other key changes
            them, and the first screen of ``plan``, ``memory`` and ``fit`` says them
        implementation (PyTorch's): of the optimizer: ``"foreach"``, ``"fused"``, ``"for_loop"``
        compile, float8: blocks and the loss are compiled, ``"blocks"``: the blocks alone (not with
            experts); products in 8 bits, ``"tensorwise"`` (``true``) or ``"rowwise"``
        offload: what lives in host memory: ``"none"``; of ``shardwright`` ``"all"``: shards,
            gradients and states of every unit, which is sharded then, or ``"auto"``: of those for
            which [a plan chooses it](planner.md); of other runtimes ``"states"``, updated there by
            an optimizer that can, and of ``fsdp2`` ``"all"``
        allocator (PyTorch's): settings as in ``PYTORCH_CUDA_ALLOC_CONF``
        loss: of a llama: logits of all words; ``"parallel"``: of each tensor rank's words;
            ``"chunked"``: a few tokens at a time
        fp32_logits (``false``): of a llama: the model returns a copy of its logits in fp32, and the
            step names it until its backward is over (``logits = model(tokens).float()``), as many
            trainers do; not beside ``"chunked"``, whose logits are never whole
        attention (``"flash"``): of an accelerator, what scaled dot product attention is: a kernel
            without a matrix of scores, or operator by operator, as ``transformers``' ``"eager"``;
            of a llama under Megatron-LM ``memory.megatron`` says it, and the next
        rms_norm (``"fused"``): of an accelerator: one kernel, or ``"composite"``: operator by
            operator in fp32, as before torch 2.9
        fsdp2: how ``runtime = "fsdp2"`` is set, by torch's names
        megatron: of a llama beside ``runtime = "megatron"``: how it is set, by its arguments
    """

    checkpointing: Policy | UnsetType = UNSET
    lowering: Literal["cpu", "cuda"] | None = None
    runtime: Runtime = "shardwright"
    param_dtype: ComputeDtype | UnsetType = UNSET
    reduce_dtype: ReduceDtype | UnsetType = UNSET
    implementation: Implementation | None = None
    reshard_after_forward: bool | Literal["default"] = "default"
    zero: Zero | Literal["auto"] | TwoZeros = 3
    compile: bool | Literal["blocks"] = False
    float8: bool | Float8 = False
    offload: Offload = "none"
    allocator: str = ""
    loss: LossKind = "gathered"
    # Keys that are younger than the format of plans: where nobody gives them they are not written,
    # and a plan's fingerprint is what it was.
    fp32_logits: bool | UnsetType = UNSET
    attention: AttentionKernel | UnsetType = UNSET
    rms_norm: NormKernel | UnsetType = UNSET
    fsdp2: Fsdp2Section | UnsetType = UNSET
    megatron: MegatronSettings | UnsetType = UNSET

    @property
    def bare(self) -> MemorySection:
        """Without those of them that say what is so anyway."""
        # UNSET and not the defaults: what nobody asks for is not written, and fingerprints of plans
        # from before these keys stay valid.
        settings = UNSET if self.fsdp2_settings == Fsdp2Section() else self.fsdp2
        layers = UNSET if self.megatron == MegatronSettings() else self.megatron
        return msgspec.structs.replace(
            self,
            fp32_logits=self.fp32_logits or UNSET,
            attention=UNSET if self.attention == "flash" else self.attention,
            rms_norm=UNSET if self.rms_norm == "fused" else self.rms_norm,
            fsdp2=settings,
            megatron=layers,
        )

    @property
    def fsdp2_settings(self) -> Fsdp2Section:
        """Those of ``fsdp2``, given or not."""
        return Fsdp2Section() if self.fsdp2 is UNSET else self.fsdp2

    @property
    def megatron_settings(self) -> MegatronSettings | None:
        """Those of Megatron-LM, given or not, where it runs."""
        if self.runtime != "megatron":
            return None
        return MegatronSettings() if self.megatron is UNSET else self.megatron

    @property
    def policy(self) -> str:
        """The checkpointing of a step that no plan decides."""
        return "none" if self.checkpointing is UNSET else self.checkpointing

    @property
    def stage(self) -> Zero:
        """The stage of ZeRO that our own runtime runs with, 3 of runtimes with other ways;
        InputError where it is left to a plan that there is not."""
        # Only our own runtime runs by stages; what another one shares follows from `runtime` and
        # `zero` as they are written.
        if self.runtime != "shardwright":
            return 3
        if self.zero == "auto":
            wanted = "1, 2 or 3 where no plan chooses it"
            raise InputError(expected("memory.zero", wanted, "'auto'", "Name one."))
        return 3 if isinstance(self.zero, tuple) else self.zero

    @property
    def twice(self) -> bool:
        """Whether gradients and states are cut over replicas as well as over shards."""
        return isinstance(self.zero, tuple)

    @property
    def on_host(self) -> bool:
        """Whether every parameter's share, gradient and states live in host memory; InputError
        where that is left to a plan that there is not."""
        if self.offload == "auto":
            wanted = "'none' or 'all' where no plan chooses it"
            raise InputError(expected("memory.offload", wanted, "'auto'", "Name one."))
        return self.offload == "all"


def float8_scaling(section: MemorySection) -> Float8 | None:
    """How products are scaled to 8 bits: one scale per tensor unless the job says otherwise."""
    if isinstance(section.float8, bool):
        return "tensorwise" if section.float8 else None
    return section.float8


# The steps of a model that is planned and trained: a plan says the rest.
# Also what rules.py allows a planned job to say: it may state what is so.
PLANNED = MemorySection(param_dtype="fp32", reduce_dtype="fp32")


# What a job says as ``zero`` that its runtime does not do, and what does it or comes near.
NO_ZERO = {
    1: (
        "1",
        "Optimizer states alone are shared by memory.runtime = 'shardwright', or 'ddp' with "
        "torch.distributed.optim.ZeroRedundancyOptimizer.",
    ),
    2: (
        "2",
        "memory.runtime = 'shardwright' shares gradients and states and has whole parameters "
        "between steps; 'fsdp2' with memory.reshard_after_forward = false has them whole from "
        "forward to backward, which FSDP calls SHARD_GRAD_OP.",
    ),
}


# What each runtime can have in host memory, and what to do for something else.
_WHOLE_ON_DEVICE = (
    "It keeps parameters and gradients on the device; memory.runtime = 'shardwright' can have them "
    "on the host."
)
OFFLOADS: dict[Runtime, tuple[tuple[Offload, ...], str]] = {
    "shardwright": (
        ("none", "all", "auto"),
        "Its shards, gradients and states are in one memory, unit by unit.",
    ),
    "fsdp2": (("none", "states", "all"), "Plans are those of memory.runtime = 'shardwright'."),
    "ddp": (("none", "states"), _WHOLE_ON_DEVICE),
    "megatron": (("none", "states"), _WHOLE_ON_DEVICE),
}


def check_memory(section: MemorySection, where: str) -> None:
    """Refuse what no runtime does; InputError names the key."""
    check_policy(section.policy, f"{where}: memory.checkpointing")
    runtime, zero = section.runtime, section.zero
    if zero == "auto" or isinstance(zero, tuple):
        if runtime != "shardwright":
            remedy = "Plans are those of memory.runtime = 'shardwright'."
            wanted = f"a stage, or nothing, beside runtime = '{runtime}'"
            found = repr(zero) if zero == "auto" else repr(list(zero))
            raise InputError(expected(f"{where}: memory.zero", wanted, found, remedy))
    elif runtime != "shardwright" and (zero == 2 or (zero == 1 and runtime not in WHOLE)):
        wanted = "1 or nothing beside" if runtime in WHOLE else "nothing beside"
        raise InputError(
            expected(f"{where}: memory.zero", f"{wanted} runtime = '{runtime}'", *NO_ZERO[zero])
        )
    ways, remedy = OFFLOADS[runtime]
    if section.offload not in ways:
        wanted = " or ".join(map(repr, ways))
        wanted = f"{wanted} beside runtime = '{runtime}'"
        raise InputError(
            expected(f"{where}: memory.offload", wanted, repr(section.offload), remedy)
        )


def check_policy(name: str, where: str) -> None:
    """InputError unless it has the form of a checkpointing policy's name."""
    if name not in CHECKPOINTING and not _PARAMETRIC.fullmatch(name):
        raise InputError(not_one_of(where, name, POLICIES))
