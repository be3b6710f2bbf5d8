"""What an optimizer's step takes on the device and gives back before it ends.

Every allocation is told in the order of ``torch.optim`` (torch 2.13), with the lifetime that its
Python names give it: a name that is bound anew still holds its old tensor while the new one is
made, so the loop over tensors and the loop over groups of one dtype both carry one tensor (or list)
over. Kernels allocate nothing more; fused steps nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.memory.optimizers import OptimizerRule, factor_elements

NEWTON_SCHULZ_STEPS = 5  # torch.optim.Muon's default
NEWTON_SCHULZ_DTYPE = "bf16"


class Change(msgspec.Struct, frozen=True, array_like=True):
    """An allocation (bytes above 0) or its release (the same name, bytes below 0)."""

    name: str
    bytes: int


def step_temporaries(rule: OptimizerRule, tensors: Iterable[TensorSpec]) -> tuple[Change, ...]:
    """What a step over ``tensors`` takes and frees, in order; all of it is freed in the end.

    ``tensors`` have their local shapes. Muon orthogonalizes whole matrices: give it the shapes of
    what a rank orthogonalizes.
    """
    if rule.offload:
        return ()
    by_rule: dict[OptimizerRule, list[TensorSpec]] = {}
    for tensor in tensors:
        by_rule.setdefault(rule.of(tensor), []).append(tensor)
    changes: list[Change] = []
    for each, its in by_rule.items():
        changes += _step(each, its)
    return tuple(changes)


def peak_bytes(changes: Iterable[Change]) -> int:
    """The most that is alive at once."""
    return max(accumulate((change.bytes for change in changes), initial=0))


def _step(rule: OptimizerRule, tensors: Sequence[TensorSpec]) -> list[Change]:
    names = _Names()
    if rule.method == "muon":
        for tensor in tensors:
            _muon(rule, tensor, names)
    elif rule.implementation == "for_loop":
        for tensor in tensors:
            _LOOPS[rule.method](rule, tensor, names)
    elif rule.implementation == "foreach":
        for group in _groups(rule, tensors):
            _LISTS[rule.method](rule, group, names)
    return names.closed()


def _groups(rule: OptimizerRule, tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Tensors of one dtype go together; Adafactor parts matrices from vectors as well."""
    found: dict[tuple[str, bool], list[TensorSpec]] = {}
    for tensor in tensors:
        matrix = rule.method == "adafactor" and len(tensor.shape) > 1
        found.setdefault((tensor.dtype, matrix), []).append(tensor)
    order = {dtype: place for place, (dtype, _) in reversed(list(enumerate(found)))}
    return [found[key] for key in sorted(found, key=lambda key: (order[key[0]], not key[1]))]


class _Names:
    """The local names of a step: each holds one tensor or one list of them."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._held: dict[str, list[Change]] = {}
        self._made = 0

    def bind(self, name: str, *sizes: int) -> None:
        """Make tensors, then let the name hold them instead of what it held."""
        made = self._take(name, sizes)
        self.drop(name)
        self._held[name] = made

    def drop(self, name: str) -> None:
        """The name holds nothing any more."""
        self._free(self._held.pop(name, []))

    def move(self, name: str, to: str) -> None:
        """What ``name`` holds is held by ``to`` instead of what that held."""
        self.drop(to)
        self._held[to] = self._held.pop(name)

    def passing(self, name: str, size: int) -> None:
        """A tensor that an expression makes and no name holds."""
        self._free(self._take(name, (size,)))

    def closed(self) -> list[Change]:
        """Every change, after all names have gone."""
        for name in list(self._held):
            self.drop(name)
        return self._changes

    def _take(self, name: str, sizes: Iterable[int]) -> list[Change]:
        made = []
        for size in sizes:
            self._made += 1
            made.append(Change(f"{name}.{self._made}", size))
        self._changes += made
        return made

    def _free(self, made: list[Change]) -> None:
        self._changes += [Change(each.name, -each.bytes) for each in made]


def _bytes(rule: OptimizerRule, tensor: TensorSpec) -> int:
    """Bytes of a tensor made from the averages."""
    return tensor.numel * rule.value_bytes(tensor)


def _gradient_bytes(rule: OptimizerRule, tensor: TensorSpec) -> int:
    return tensor.numel * element_bytes(rule.updated_dtype(tensor))


def _loop_sgd(rule: OptimizerRule, tensor: TensorSpec, names: _Names) -> None:
    size = _gradient_bytes(rule, tensor)
    names.drop("grad")
    if rule.coupled_decay:
        names.bind("grad", size)
    if rule.momentum and rule.nesterov:
        names.bind("grad", size)
    elif rule.momentum:
        names.drop("grad")


def _loop_adam(rule: OptimizerRule, tensor: TensorSpec, names: _Names) -> None:
    names.drop("grad")
    if rule.coupled_decay:
        names.bind("grad", _gradient_bytes(rule, tensor))
    names.bind("root", _bytes(rule, tensor))
    names.bind("denom", _bytes(rule, tensor))
    names.drop("root")


def _loop_adagrad(rule: OptimizerRule, tensor: TensorSpec, names: _Names) -> None:
    names.drop("grad")
    if rule.coupled_decay:
        names.bind("grad", _gradient_bytes(rule, tensor))
    names.bind("std", _bytes(rule, tensor))


def _loop_adafactor(rule: OptimizerRule, tensor: TensorSpec, names: _Names) -> None:
    item = rule.value_bytes(tensor)
    names.passing("norm", element_bytes(rule.updated_dtype(tensor)))
    if len(tensor.shape) > 1:
        rows, columns = factor_elements(tensor.shape)
        names.bind("row_mean", rows * item)
        names.bind("col_mean", columns * item)
        names.bind("var_estimate", tensor.numel * item)
        names.passing("mean", rows // max(1, tensor.shape[-2]) * item)
    else:
        names.bind("grad_squared", tensor.numel * item)
        names.bind("var_estimate", tensor.numel * item)
    names.move("var_estimate", "update")
    names.passing("norm", item)


def _lists_sgd(rule: OptimizerRule, tensors: Sequence[TensorSpec], names: _Names) -> None:
    names.drop("grads")
    if rule.coupled_decay:
        names.bind("grads", *(_gradient_bytes(rule, each) for each in tensors))
    if rule.momentum and not rule.nesterov:
        names.drop("grads")


def _lists_adam(rule: OptimizerRule, tensors: Sequence[TensorSpec], names: _Names) -> None:
    if rule.coupled_decay:
        names.bind("grads", *(_gradient_bytes(rule, each) for each in tensors))
        names.drop("grads")
    names.bind("exp_avg_sq_sqrt", *(_bytes(rule, each) for each in tensors))


def _lists_adagrad(rule: OptimizerRule, tensors: Sequence[TensorSpec], names: _Names) -> None:
    sizes = [_bytes(rule, each) for each in tensors]
    if rule.coupled_decay:
        names.bind("grads", *(_gradient_bytes(rule, each) for each in tensors))
        names.bind("std", *sizes)
        names.move("grads", "numerator")
    else:
        names.bind("std", *sizes)
        names.bind("numerator", *sizes)


def _lists_adafactor(rule: OptimizerRule, tensors: Sequence[TensorSpec], names: _Names) -> None:
    item = rule.value_bytes(tensors[0])
    whole = [each.numel * item for each in tensors]
    for _ in tensors:
        names.passing("norm", element_bytes(rule.updated_dtype(tensors[0])))
    if len(tensors[0].shape) > 1:
        factors = [factor_elements(each.shape) for each in tensors]
        names.bind("row_means", *(rows * item for rows, _ in factors))
        names.drop("row_means")
        names.bind("col_means", *(columns * item for _, columns in factors))
        names.drop("col_means")
        names.bind("var_estimates", *whole)
        both = zip(tensors, factors, strict=True)
        names.bind("means", *(f[0] // max(1, each.shape[-2]) * item for each, f in both))
        names.drop("means")
    else:
        names.bind("grads_squared", *whole)
        names.drop("grads_squared")
        names.bind("var_estimates", *whole)
    names.move("var_estimates", "updates")
    for _ in tensors:
        names.passing("norm", item)


def _muon(rule: OptimizerRule, tensor: TensorSpec, names: _Names) -> None:
    """A matrix at a time: its update, made orthogonal by Newton-Schulz iterations in bf16."""
    names.bind("update", _gradient_bytes(rule, tensor))
    item = element_bytes(NEWTON_SCHULZ_DTYPE)
    if rule.updated_dtype(tensor) != NEWTON_SCHULZ_DTYPE:
        names.bind("ortho_grad", tensor.numel * item)
    names.bind("norm", item)
    names.passing("clamped", item)
    names.drop("norm")
    gram = min(tensor.shape) ** 2 * item
    for _ in range(NEWTON_SCHULZ_STEPS):
        names.bind("gram_matrix", gram)
        names.bind("gram_update", gram)
        names.bind("ortho_grad", tensor.numel * item)
    names.drop("gram_matrix")
    names.drop("gram_update")
    names.move("ortho_grad", "update")


_LOOPS = {
    "sgd": _loop_sgd,
    "adam": _loop_adam,
    "adagrad": _loop_adagrad,
    "adafactor": _loop_adafactor,
}
_LISTS = {
    "sgd": _lists_sgd,
    "adam": _lists_adam,
    "adagrad": _lists_adagrad,
    "adafactor": _lists_adafactor,
}
