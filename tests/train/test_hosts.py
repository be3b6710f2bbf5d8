"""What the ranks of several hosts compare before a run: threads that meet in one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from shardwright.core.errors import InputError, MismatchError, PeerError
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan
from shardwright.job.train import CheckpointSection
from shardwright.train.hosts import HostFacts, Hosts, check_facts

JOB = {
    "model": {"kind": "transformer", "layers": 1, "dim": 16, "heads": 2},
    "cluster": {"preset": "local", "world_size": 2, "local_world_size": 1},
    "batch": {"size": 4, "sequence": 16},
    "train": {"timeout": 10.0},
}


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(parse_job(JOB))


def met(
    made: Plan,
    folders: tuple[Path, Path],
    *,
    ahead: float = 0.0,
    prepare: Callable[[int], None] = lambda rank: None,
) -> tuple[list[Hosts], dict[int, Exception], list[int]]:
    """Both ranks' hosts, their errors, and who prepared a folder."""
    store, prepared = dist.HashStore(), list[int]()
    hosts = [Hosts(made, 0, folders[0])]
    hosts.append(Hosts(made, 1, folders[1], lambda: time.time() + ahead))
    errors: dict[int, Exception] = {}
    together = threading.Barrier(2)

    def rank(number: int) -> None:
        def begin() -> None:
            prepared.append(number)
            prepare(number)

        try:
            with hosts[number].ready(store, begin):
                together.wait(10)  # both hold their folders
        except Exception as error:
            errors[number] = error
            together.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return hosts, errors, prepared


def test_a_folder_that_hosts_share_is_prepared_once(made: Plan, tmp_path: Path) -> None:
    hosts, errors, prepared = met(made, (tmp_path, tmp_path))
    assert not errors
    assert prepared == [0]
    assert [each.shared for each in hosts] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["launcher.lock"]


def test_every_host_prepares_a_folder_of_its_own(made: Plan, tmp_path: Path) -> None:
    hosts, errors, prepared = met(made, (tmp_path / "a", tmp_path / "b"))
    assert not errors
    assert sorted(prepared) == [0, 1]
    assert [each.shared for each in hosts] == [True, False]


def test_a_host_that_cannot_prepare_ends_the_others_with_its_reason(
    made: Plan, tmp_path: Path
) -> None:
    def prepare(rank: int) -> None:
        if rank == 1:
            raise InputError("data.path: expected a click log, got none.")

    _, errors, _ = met(made, (tmp_path / "a", tmp_path / "b"), prepare=prepare)
    assert isinstance(errors[1], InputError)
    assert isinstance(errors[0], PeerError)
    assert "(rank 1): data.path: expected a click log, got none." in str(errors[0])


def test_checkpoints_need_a_folder_that_all_hosts_share(made: Plan, tmp_path: Path) -> None:
    def saved(folder: Path | str) -> Plan:
        section = CheckpointSection(folder=str(folder))
        return msgspec.structs.replace(
            made, job=msgspec.structs.replace(made.job, checkpoint=section)
        )

    _, errors, _ = met(saved(""), (tmp_path / "a", tmp_path / "b"))
    for rank in (0, 1):
        wanted = "checkpoint.folder: expected a folder that all hosts share, got "
        assert str(errors[rank]).startswith(wanted)
    _, errors, _ = met(saved(tmp_path / "common"), (tmp_path / "c", tmp_path / "d"))
    assert not errors
    assert not list((tmp_path / "common").iterdir())


def test_clocks_that_are_far_apart_are_said_with_how_far(made: Plan, tmp_path: Path) -> None:
    for ahead, said in ((0.5, None), (120.0, "ahead of"), (-120.0, "behind")):
        hosts, errors, _ = met(made, (tmp_path / "a", tmp_path / "b"), ahead=ahead)
        assert not errors
        assert not hosts[1].lines
        if said is None:
            assert not hosts[0].lines
        else:
            (line,) = hosts[0].lines
            assert said in line
            assert 118 < float(line.split(" is ")[1].split()[0]) < 122


def test_another_version_or_plan_is_named_with_host_and_ranks(made: Plan) -> None:
    for name in ("plan", "torch version", "size of rows.tsv"):
        facts = [HostFacts(0, "alpha", "/a", {name: "1"}), HostFacts(1, "beta", "/b", {name: "2"})]
        text = (
            f"hosts: expected the same {name} everywhere, got another one on beta (rank 1) than on "
            "alpha. Start every host from the same plan, code, versions and data."
        )
        with pytest.raises(MismatchError) as error:
            check_facts(facts, made)
        assert str(error.value) == text


def test_another_number_of_ranks_to_a_host_than_planned_is_refused(made: Plan) -> None:
    facts = [HostFacts(0, "alpha", "/a", {}), HostFacts(0, "alpha", "/a", {})]
    with pytest.raises(MismatchError, match="expected 2 with 1 ranks each, as planned, got 1 with"):
        check_facts(facts, made)
    check_facts([HostFacts(3, "alpha", "/a", {}), HostFacts(7, "beta", "/a", {})], made)


def test_a_rank_that_does_not_answer_is_named(made: Plan, tmp_path: Path) -> None:
    short = msgspec.structs.replace(made.job.train, timeout=0.2)
    impatient = msgspec.structs.replace(made, job=msgspec.structs.replace(made.job, train=short))
    hosts = Hosts(impatient, 0, tmp_path)
    wanted = "setup: expected a word of all 2 ranks within 0.2 s, got none of rank 1."
    with pytest.raises(PeerError) as error, hosts.ready(dist.HashStore(), lambda: None):
        pass
    assert str(error.value) == wanted
