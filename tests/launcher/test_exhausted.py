"""Memory that could not be had is said as that, whoever could not have it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

import pytest

from shardwright.core.errors import InputError
from shardwright.launcher.exhausted import (
    _BeforeTorch,
    how_exhausted,
    out_of_memory,
    words_of_memory,
)

FAR = 2**46  # bytes; more than any test maps


@pytest.fixture
def limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (FAR, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_every_way_to_say_it_is_known(error: Exception) -> None:
    assert out_of_memory(error)
    assert not out_of_memory(ValueError("another"))


def test_an_error_is_of_memory_where_it_follows_from_one() -> None:
    error = RuntimeError("cannot join thread before it is started")
    error.__context__ = RuntimeError("can't start new thread")
    assert how_exhausted(error).startswith('"can\'t start new thread"')


def test_a_limit_is_named_and_explains_what_says_nothing(limited: None) -> None:
    silent = SystemError("error return without exception set")
    assert how_exhausted(silent).endswith(" in an address space of 64.00 TiB (ulimit -v)")


def test_without_a_limit_an_error_that_says_nothing_is_no_error_of_memory() -> None:
    assert not out_of_memory(SystemError("error return without exception set"))


def test_the_first_word_of_it_in_a_log_is_the_cause() -> None:
    log = "step 3\n  RuntimeError: can't start new thread\nRuntimeError: cannot join thread\n"
    assert words_of_memory(log) == "RuntimeError: can't start new thread"
    assert words_of_memory("KeyError: 'x'\n") == ""


def test_torch_is_not_imported_into_less_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (600 * 2**20, -1))
    _BeforeTorch.find_spec("numpy")
    with pytest.raises(InputError) as caught:
        _BeforeTorch.find_spec("torch")
    assert str(caught.value) == (
        "memory: expected 750.00 MiB of address space or more for torch, got a limit of 600.00 MiB "
        "(ulimit -v). Free memory, or raise the limit."
    )
