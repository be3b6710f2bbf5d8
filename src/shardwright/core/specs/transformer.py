"""A small GPT: embeddings, pre-norm blocks of causal attention and a GELU MLP, a head of its own.

Parameter order and allocations are those of ``shardwright.models.transformer``, which the tests
hold against this description: what autograd saves, what the kernels of a CPU return, and when each
is let go. A sample is a sequence, so sizes per sample hold ``batch.sequence`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.batch import INDEX_BYTES
from shardwright.core.errors import InputError, expected
from shardwright.core.job import Job
from shardwright.core.model import Allocation, ModelSpec, Stage, UnitSpec, Work
from shardwright.core.model_section import ModelSection
from shardwright.core.tensor import TensorSpec

FLOAT = 4  # everything is computed in fp32
SERIES = "layers"  # blocks that follow one another may share a unit
# Operations per element, for what is no matrix product.
NORM_FLOPS = 8
GELU_FLOPS = 10
LOSS_FLOPS = 10


def spec(job: Job) -> ModelSpec:
    """The transformer of ``job`` as a :class:`ModelSpec`."""
    section, tokens = job.model, job.batch.sequence
    if section.dim % section.heads:
        raise InputError(
            expected("model.heads", f"a divisor of model.dim = {section.dim}", str(section.heads))
        )
    names = tuple(f"layers.{index}" for index in range(section.layers))
    blocks = tuple(_Block(name, section, tokens) for name in names)
    outputs = ("embed.out", *(f"{name}.out" for name in names))
    optimizer = job.train.optimizer
    return ModelSpec(
        kind="transformer",
        tables=(),
        units=(
            UnitSpec("embed", embed_tensors(section, tokens), optimizer),
            *(UnitSpec(n, block_tensors(n, section), optimizer, SERIES) for n in names),
            UnitSpec("head", head_tensors(section), optimizer),
        ),
        stages=(
            _embed(section, tokens),
            *(block.stage(x) for block, x in zip(blocks, outputs, strict=False)),
            _head(section, tokens, outputs[-1]),
            _loss(section.vocab, tokens),
        ),
        inputs=tuple(
            Allocation(name, "input", tokens * INDEX_BYTES) for name in ("inputs", "targets")
        ),
    )


def feed_forward_width(section: ModelSection) -> int:
    """Width of the layer between the two linears of a block's MLP."""
    return section.ffn_dim or 4 * section.dim


def embed_tensors(section: ModelSection, tokens: int) -> tuple[TensorSpec, ...]:
    """What a token is, and where it stands."""
    return (
        TensorSpec("embed.token.weight", (section.vocab, section.dim)),
        TensorSpec("embed.position.weight", (tokens, section.dim)),
    )


def block_tensors(name: str, section: ModelSection) -> tuple[TensorSpec, ...]:
    """Weights and biases of a block, in the order of its forward."""
    dim, wide = section.dim, feed_forward_width(section)
    shapes: dict[str, tuple[int, ...]] = {
        "norm1": (dim,),
        "qkv": (3 * dim, dim),
        "proj": (dim, dim),
        "norm2": (dim,),
        "up": (wide, dim),
        "down": (dim, wide),
    }
    return tuple(
        TensorSpec(f"{name}.{layer}.{part}", shape if part == "weight" else shape[:1])
        for layer, shape in shapes.items()
        for part in ("weight", "bias")
    )


def head_tensors(section: ModelSection) -> tuple[TensorSpec, ...]:
    """The last norm and the map to the vocabulary, which has no bias."""
    return (
        TensorSpec("head.norm.weight", (section.dim,)),
        TensorSpec("head.norm.bias", (section.dim,)),
        TensorSpec("head.vocab.weight", (section.vocab, section.dim)),
    )


def _saved(name: str, numbers: int) -> Allocation:
    """A result of the forward, ``numbers`` of fp32 for each sample."""
    return Allocation(name, "activation", numbers * FLOAT)


def _passing(name: str, numbers: int) -> Allocation:
    """A gradient of such a result."""
    return Allocation(f"gradient.{name}", "temporary", numbers * FLOAT)


def _of_parameter(name: str, numbers: int) -> Allocation:
    """A parameter's gradient, which stays until its unit's is summed."""
    return Allocation(f"gradient.{name}", "unreduced_gradient", 0, numbers * FLOAT)


@dataclass(frozen=True, slots=True)
class _Linear:
    """``tokens`` rows of ``fan_in`` to ``fan_out``; ``name`` is also that of its output."""

    name: str
    tokens: int
    fan_in: int
    fan_out: int
    bias: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.fan_in * self.fan_out

    def forward(self) -> Work:
        return Work(self.name, self.flops, (_saved(self.name, self.tokens * self.fan_out),))

    def backward(self, source: str, *gone: str) -> Work:
        """Gradients of the input ``source``, the weight and the bias, all alive at once."""
        weight = _of_parameter(f"{self.name}.weight", self.fan_in * self.fan_out)
        takes = [_passing(source, self.tokens * self.fan_in), weight]
        if self.bias:
            takes.append(_of_parameter(f"{self.name}.bias", self.fan_out))
        return Work(self.name, 2 * self.flops, tuple(takes), gone)


@dataclass(frozen=True, slots=True)
class _Norm:
    """``tokens`` rows of ``dim``; it keeps its input, and a mean and a deviation for each row."""

    name: str
    tokens: int
    dim: int

    @property
    def flops(self) -> int:
        return NORM_FLOPS * self.tokens * self.dim

    @property
    def _statistics(self) -> tuple[str, str]:
        return f"{self.name}.mean", f"{self.name}.rstd"

    def forward(self) -> Work:
        rows = tuple(_saved(name, self.tokens) for name in self._statistics)
        return Work(self.name, self.flops, (_saved(self.name, self.tokens * self.dim), *rows))

    def backward(self, source: str, outgoing: str, *gone: str) -> Work:
        """``source`` is the input that was kept, ``outgoing`` what its gradient is called."""
        takes = (
            _passing(outgoing, self.tokens * self.dim),
            _of_parameter(f"{self.name}.weight", self.dim),
            _of_parameter(f"{self.name}.bias", self.dim),
        )
        frees = (f"gradient.{self.name}", source, *self._statistics, *gone)
        return Work(self.name, 2 * self.flops, takes, frees)


class _Block:
    """Both halves of a block: each adds to the stream that it reads."""

    def __init__(self, name: str, section: ModelSection, tokens: int) -> None:
        dim, wide = section.dim, feed_forward_width(section)
        self.name, self.tokens, self.heads = name, tokens, section.heads
        self.stream, self.wide = tokens * dim, tokens * wide
        self.attention_flops = 2 * tokens * tokens * dim  # of one product of two matrices
        self.norm1 = _Norm(f"{name}.norm1", tokens, dim)
        self.qkv = _Linear(f"{name}.qkv", tokens, dim, 3 * dim)
        self.proj = _Linear(f"{name}.proj", tokens, dim, dim)
        self.norm2 = _Norm(f"{name}.norm2", tokens, dim)
        self.up = _Linear(f"{name}.up", tokens, dim, wide)
        self.down = _Linear(f"{name}.down", tokens, wide, dim)

    def stage(self, source: str) -> Stage:
        """``source`` is the stream before this block."""
        forward = (*self._attend(), *self._feed_forward())
        backward = (*self._feed_backward(), *self._attend_backward(source))
        return Stage(self.name, "gather", forward, backward)

    def _attend(self) -> tuple[Work, ...]:
        found = _saved(f"{self.name}.attention", self.stream)
        sums = _saved(f"{self.name}.logsumexp", self.tokens * self.heads)
        middle = _saved(f"{self.name}.middle", self.stream)
        return (
            self.norm1.forward(),
            self.qkv.forward(),
            Work(found.name, 2 * self.attention_flops, (found, sums)),
            self.proj.forward(),
            Work(middle.name, self.stream, (middle,), (self.proj.name,)),
        )

    def _feed_forward(self) -> tuple[Work, ...]:
        gelu = _saved(f"{self.name}.gelu", self.wide)
        out = _saved(f"{self.name}.out", self.stream)
        return (
            self.norm2.forward(),
            self.up.forward(),
            Work(gelu.name, GELU_FLOPS * self.wide, (gelu,)),
            self.down.forward(),
            Work(out.name, self.stream, (out,), (self.down.name,)),
        )

    def _feed_backward(self) -> tuple[Work, ...]:
        up, gelu = self.up.name, f"{self.name}.gelu"
        gelu_backward = Work(
            gelu, 2 * GELU_FLOPS * self.wide, (_passing(up, self.wide),), (f"gradient.{gelu}", up)
        )
        return (
            self.down.backward(gelu, gelu),
            gelu_backward,
            self.up.backward(self.norm2.name, f"gradient.{up}", self.norm2.name),
            *self._branch(self.norm2, f"{self.name}.middle", f"{self.name}.out"),
        )

    def _attend_backward(self, source: str) -> tuple[Work, ...]:
        found, qkv = f"{self.name}.attention", self.qkv.name
        parts = tuple(
            _passing(f"{self.name}.{part}", self.stream) for part in ("query", "key", "value")
        )
        names = tuple(part.name for part in parts)
        kept = (f"gradient.{found}", qkv, f"{self.name}.logsumexp", found)
        return (
            self.proj.backward(found),
            Work(found, 5 * self.attention_flops, parts, kept),
            Work(f"{qkv}.cat", 0, (_passing(qkv, 3 * self.stream),), names),
            self.qkv.backward(self.norm1.name, f"gradient.{qkv}", self.norm1.name),
            *self._branch(self.norm1, source, f"{self.name}.middle"),
        )

    def _branch(self, norm: _Norm, source: str, after: str) -> tuple[Work, ...]:
        """Back through the norm, whose gradient is added to the one that went past the branch."""
        joined = _passing(source, self.stream)
        branch = f"{norm.name}.input"
        gone = (f"gradient.{branch}", f"gradient.{after}")
        return (
            norm.backward(source, branch),
            Work(f"{branch}.add", self.stream, (joined,), gone),
        )


def _embed(section: ModelSection, tokens: int) -> Stage:
    stream = tokens * section.dim
    token, out = _saved("embed.token", stream), _saved("embed.out", stream)
    forward = (
        Work(token.name, 0, (token,)),
        Work(out.name, stream, (out,), (token.name,)),
    )
    summed = Allocation("gradient.embed.position", "temporary", 0, stream * FLOAT)
    placed = _of_parameter("embed.position.weight", stream)
    of_tokens = _of_parameter("embed.token.weight", section.vocab * section.dim)
    backward = (
        Work("embed.position", stream, (summed,)),
        Work("embed.position.slice", 0, (placed,), (summed.name,)),
        Work(
            "embed.token",
            stream,
            (of_tokens,),
            ("gradient.embed.out", "gradient.loss"),
        ),
    )
    return Stage("embed", "gather", forward, backward)


def _head(section: ModelSection, tokens: int, source: str) -> Stage:
    norm = _Norm("head.norm", tokens, section.dim)
    vocab = _Linear("head.vocab", tokens, section.dim, section.vocab, bias=False)
    backward = (
        vocab.backward(norm.name, f"gradient.{vocab.name}", norm.name),
        norm.backward(source, source),
    )
    return Stage("head", "gather", (norm.forward(), vocab.forward()), backward)


def _loss(vocab: int, tokens: int) -> Stage:
    """Cross entropy keeps the logarithms of the softmax; the logits go when it is done."""
    numbers = tokens * vocab
    logarithms = _saved("loss.softmax", numbers)
    loss = Allocation("loss", "output", 0, FLOAT)
    counted = Allocation("loss.weight", "activation", 0, FLOAT)
    of_logarithms = _passing("loss.softmax", numbers)
    forward = (
        Work("loss.softmax", LOSS_FLOPS * numbers, (logarithms,)),
        Work("loss", tokens, (loss, counted), ("head.vocab",)),
    )
    backward = (
        Work("loss.ones", 0, (Allocation("gradient.loss", "temporary", 0, FLOAT),)),
        Work("loss", tokens, (of_logarithms,), (counted.name,)),
        Work(
            "loss.softmax",
            LOSS_FLOPS * numbers,
            (_passing("head.vocab", numbers),),
            (of_logarithms.name, logarithms.name),
        ),
    )
    return Stage("loss", "none", forward, backward)
