"""Llama-style decoders, dense and with experts: whole, or the part that one rank holds."""

from shardwright.models.llama.loss import chunked_loss, loss, parallel_loss
from shardwright.models.llama.model import Block, Llama

__all__ = ["Block", "Llama", "chunked_loss", "loss", "parallel_loss"]
