"""The errors a user can meet, and the process exit code that belongs to each.

Every message reads ``where: expected X, got Y. what to do`` and names the file, the key or the
tensor. ``ValueError``-like types are the user's to mend; an ``AssertionError`` is ours.
"""

# Exit codes are a contract: a scheduler may restart what ends with 75 and gives up what ends with
# 2, so a type says which of the two an error is, not where it was raised. Whoever raises writes
# the line; nobody above adds to it, for then a message would say less about its own key.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import chain

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INPUT = 2
EXIT_NO_PLAN = 3
EXIT_MISMATCH = 4
EXIT_RUN_FAILED = 5
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class ShardwrightError(Exception):
    """Base of every error this package raises on purpose; ``exit_code`` is the process's.

    ``ShardwrightError(where, wanted, found, remedy)`` words its message as ``expected`` does; one
    argument is the whole message.
    """

    exit_code = EXIT_BUG

    def __init__(self, where: str, wanted: str = "", found: str = "", remedy: str = "") -> None:
        super().__init__(expected(where, wanted, found, remedy) if wanted else where)


class InputError(ShardwrightError, ValueError):
    """A file, a key, a size or a call that cannot be used as it was given."""

    exit_code = EXIT_INPUT


class UnsupportedError(InputError):
    """A valid request that this version does not carry out; the message names the alternative."""


class NoPlanError(ShardwrightError):
    """No assignment of tensors to ranks fits the memory of the cluster."""

    exit_code = EXIT_NO_PLAN


class MismatchError(ShardwrightError):
    """Two things that must agree do not: ranks, plan and job, prediction and measurement."""

    exit_code = EXIT_MISMATCH


class RunError(ShardwrightError):
    """A training run that started and could not finish."""

    exit_code = EXIT_RUN_FAILED


class StoppedError(ShardwrightError):
    """A run that a signal stopped between two steps."""

    exit_code = EXIT_PREEMPTED


class PeerError(RunError):
    """This rank could go on; another one could not, and says why itself."""


NEAREST = 5  # names that a message suggests

# What people of the field write, without separators, and the names that mean it here; the first
# that is known where it was written is the one that was meant.
ALIASES = {
    # degrees and sizes
    "tp": ("tensor",),
    "pp": ("pipeline",),
    "cp": ("context",),
    "ep": ("expert",),
    "etp": ("expert_tensor",),
    "sp": ("sequence",),
    "dp": ("data_shard", "data_parallel", "ddp"),
    "fsdp": ("data_shard", "fsdp2", "shard"),
    "hsdp": ("data_replicate",),
    "ddp": ("data_replicate", "data_parallel"),
    "gradaccum": ("microbatches",),
    "gradientaccumulationsteps": ("microbatches",),
    "bs": ("size",),
    "batchsize": ("size",),
    "microbatchsize": ("size", "micro_batch"),
    "seqlen": ("sequence",),
    "seqlength": ("sequence",),
    "sequencelength": ("sequence",),
    "ngpus": ("world_size",),
    "gpus": ("world_size",),
    "nproc": ("world_size", "--ranks"),
    "lr": ("learning_rate",),
    # dtypes
    "bfloat16": ("bf16",),
    "float16": ("fp16",),
    "half": ("fp16",),
    "float32": ("fp32",),
    "float": ("fp32",),
    "single": ("fp32",),
    "float8": ("fp8",),
    # devices, runtimes and engines
    "gpu": ("cuda",),
    "nvidia": ("cuda",),
    "host": ("cpu", "cpu-host"),
    "fullyshard": ("fsdp2", "shard"),
    "deepspeed": ("accelerate",),
    "mcore": ("megatron",),
    "titan": ("torchtitan",),
    # checkpointing, optimizers, kernels
    "activationcheckpointing": ("checkpointing",),
    "gradientcheckpointing": ("checkpointing",),
    "recompute": ("checkpointing", "full"),
    "sac": ("selective",),
    "zerostage": ("zero",),
    "reshardafterforward": ("resharded",),
    "adam8bit": ("adamw_8bit",),
    "fa": ("flash",),
    "fa2": ("flash",),
    "sdpa": ("flash",),
    "flashattention": ("flash",),
    "math": ("eager",),
    # sharding types and kernels of tables
    "rw": ("row_wise",),
    "tw": ("table_wise",),
    "cw": ("column_wise",),
    "twrw": ("table_row_wise",),
    "twcw": ("table_column_wise",),
    "uvm": ("fused_uvm",),
    "uvmcaching": ("fused_uvm_caching",),
    "ssd": ("key_value",),
    # models and commands
    "gpt": ("transformer", "llama"),
    "estimate": ("memory",),
    "launch": ("train",),
    "start": ("train",),
    "new": ("init",),
    "check": ("doctor",),
    "benchmark": ("calibrate",),
    "info": ("explain",),
}


def _plain(name: str) -> str:
    """A name without case, separators and torch's own prefix."""
    return "".join(filter(str.isalnum, name.lower().removeprefix("torch.")))


def is_called(name: str, known: Iterable[str]) -> str:
    """The known name that is the same but for case and separators, or what the field calls it;
    empty where there is none."""
    names, bare = {_plain(each): each for each in reversed(list(known))}, _plain(name)
    meant = (bare, *map(_plain, ALIASES.get(bare, ())))
    return next((names[each] for each in meant if each in names), "")


def likeliest(name: str, known: Iterable[str]) -> str:
    """The known name that was meant: what :func:`is_called` so; then one that begins with ``name``,
    the most alike, and one that ``name`` begins with; empty where none is like it."""
    known = list(known)
    names, bare = {_plain(each): each for each in reversed(known)}, _plain(name)
    meant = filter(None, (is_called(name, known),))
    begins = (names[each] for each in reversed(names) if bare and each.startswith(bare))
    alike = (names[each] for each in get_close_matches(bare, names, n=1))
    within = (names[each] for each in reversed(names) if len(each) > 2 and bare.startswith(each))
    return next(chain(meant, begins, alike, within), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question that every message about a wrong name ends in, of a key, a value, a command or
    what a file has; empty where nothing is like it."""
    near = likeliest(name, known)
    return f"Did you mean '{near}'?" if near else ""


def not_one_of(where: str, name: str, known: Iterable[str]) -> str:
    """What is said of a ``name`` where only ``known`` ones may stand."""
    names = list(known)
    wanted = f"one of {', '.join(names)}"
    return expected(where, wanted, f"'{name}'", did_you_mean(name, names))


def there_are(name: str, known: Iterable[str]) -> str:
    """What was meant by ``name``, and the known names most like it, all where there are few; empty
    where there are none."""
    names = list(known)
    if not names:
        return ""
    lower = {each.lower(): each for each in reversed(names)}
    close = [lower[each] for each in get_close_matches(name.lower(), lower, NEAREST, cutoff=0.4)]
    within = [each for each in names if name.lower() in each.lower() and each not in close]
    shown = names if len(names) <= NEAREST else ([*close, *within] or names)[:NEAREST]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    listing = ", ".join(f"'{each}'" for each in shown)
    there = f"There {'are' if len(names) > 1 else 'is'} {listing}{more}."
    return " ".join(filter(None, (did_you_mean(name, names), there)))


def listed(names: Sequence[str], most: int) -> str:
    """The first of the names, at ``most`` so many, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_type(value: object, kind: type, where: str, remedy: str = "") -> None:
    """InputError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise InputError(where, f"a {kind.__name__}", type(value).__name__, remedy)


def expected(where: str, wanted: str, found: str, remedy: str = "") -> str:
    """One line in the form every message of this package has."""
    text = f"{where}: expected {wanted}, got {found}."
    return f"{text} {remedy}" if remedy else text
