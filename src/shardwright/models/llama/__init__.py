"""Llama-style decoders, dense and with experts: whole, or the part that one rank holds."""

from shardwright.models.llama.model import Llama, LlamaBlock, chunked_loss, loss, parallel_loss

__all__ = ["Llama", "LlamaBlock", "chunked_loss", "loss", "parallel_loss"]
