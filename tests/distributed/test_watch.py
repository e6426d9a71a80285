"""A rank that dies, stops, is late or fails: the others end in time, name it, exit with an error (C32)."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from distributed.harness import RankOutcome, observe_ranks, run_ranks
from equipoise.accelerator import CPUAccelerator
from equipoise.distributed import WATCHDOG_EXIT_CODE, join_world
from equipoise.distributed.status import Board, Status
from equipoise.distributed.watch import Watch
from equipoise.errors import RankFailure

TIMEOUT_S = 2.0
START_S = 8.0  # interpreters, imports and rendezvous on a busy machine


def survivor_report(outcome: RankOutcome) -> str:
    """What a surviving rank said; it must have ended by itself with an error."""
    assert outcome.exit_code in (1, WATCHDOG_EXIT_CODE), outcome
    return outcome.traceback + outcome.output


def die_before_the_first_collective(path: str) -> None:
    with join_world(CPUAccelerator(), TIMEOUT_S, rendezvous_s=30, store=dist.FileStore(path, 2)) as world:
        pair = world.groups.create_partition("pair", [[0, 1]])
        dist.barrier(group=world.group)
        if world.rank == 0:
            os._exit(86)
        with world.operation("step 1: backward", pair):
            dist.all_reduce(torch.ones(1), group=pair)


def test_c32_a_peer_that_died_before_the_first_collective_of_a_lazy_group_is_named(tmp_path) -> None:
    dead, survivor = observe_ranks(
        die_before_the_first_collective,
        2,
        str(tmp_path / "store"),
        deadline_s=40,
        env={"TORCH_GLOO_LAZY_INIT": "1"},
    )
    assert dead.exit_code == 86
    report = survivor_report(survivor)
    assert survivor.seconds - dead.seconds < 8 * TIMEOUT_S
    assert '"step 1: backward" on rank 1 of 2' in report
    assert "rank 0 (host " in report
    assert "its process has ended" in report


def update_weights(receiver: int) -> None:
    weights = torch.ones(2**20)
    with join_world(CPUAccelerator(), TIMEOUT_S, rendezvous_s=30) as world:
        sender = 1 - receiver
        for update in range(20):
            with world.operation(f"update {update}", world.group):
                if update == 1 and world.rank == receiver:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.broadcast(weights, sender, group=world.group)
                world.watch.progress()


@pytest.mark.parametrize("receiver", [1, 0])
def test_c32_a_receiver_killed_between_two_updates_is_named(receiver: int) -> None:
    outcomes = observe_ranks(update_weights, 2, receiver, deadline_s=40)
    assert outcomes[receiver].exit_code == -signal.SIGKILL
    sender = outcomes[1 - receiver]
    report = survivor_report(sender)
    assert sender.seconds - outcomes[receiver].seconds < 8 * TIMEOUT_S + 10
    if receiver == 1:
        assert 'group "all" (ranks 0-1)' in report
        assert "rank 1 (host " in report
        assert "its process has ended" in report
    else:  # rank 0 serves the store
        assert "the store of the run (the process of rank 0 at 127.0.0.1:" in report
        assert "its host is likely dead" in report


def stop_one() -> None:
    with join_world(CPUAccelerator(), TIMEOUT_S, rendezvous_s=30) as world:
        with world.operation("step 3: forward"):
            if world.rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGSTOP)
        with world.operation("step 3: backward"):
            dist.all_reduce(torch.ones(1), group=world.group)


def test_c32_a_stopped_rank_is_named_within_the_deadline() -> None:
    survivor, stopped = observe_ranks(stop_one, 2, deadline_s=40, wait_for=[0])
    report = survivor_report(survivor)
    assert survivor.seconds < START_S + 4 * TIMEOUT_S + 10
    assert stopped.exit_code is None
    assert '"step 3: backward" on rank 0 of 2' in report
    assert "rank 1 (host " in report
    assert "is stopped" in report
    assert 'last seen in "step 3: forward"' in report


def hang_without_a_backend() -> None:
    with join_world(CPUAccelerator(), TIMEOUT_S, rendezvous_s=30) as world:
        if world.rank == 1:
            with world.operation("step 4: data", deadline_s=60):
                time.sleep(60)
        with world.operation("step 4", world.group), world.operation("forward"):
            wait_for_a_transfer_that_never_ends()


def wait_for_a_transfer_that_never_ends() -> None:
    while True:
        time.sleep(0.1)


def test_a_hang_that_no_backend_notices_ends_the_process_with_names_and_stacks() -> None:
    hung, _ = observe_ranks(hang_without_a_backend, 2, deadline_s=40, wait_for=[0])
    assert hung.exit_code == WATCHDOG_EXIT_CODE
    assert "made no progress for 3." in hung.output
    assert "(deadline 3 s)" in hung.output
    assert '"step 4 / forward" on rank 0 of 2, among group "all" (ranks 0-1)' in hung.output
    assert "rank 1 (host " in hung.output
    assert 'late: in "step 4: data"' in hung.output
    assert "wait_for_a_transfer_that_never_ends" in hung.output


def work_long() -> str:
    lose_the_store()
    with join_world(CPUAccelerator(), 0.8, rendezvous_s=30) as world:
        with world.operation("compile", deadline_s=30):
            time.sleep(1.6)
            with world.operation("inner"):  # has the deadline of the operation around it
                time.sleep(1.6)
        with world.operation("download"):
            for _ in range(5):
                time.sleep(0.4)
                world.watch.progress()
        time.sleep(1.6)  # between operations nothing is watched
        try:
            with world.operation("user code"):
                raise RuntimeError("shapes differ")
        except RuntimeError as e:
            return f"{type(e).__name__}: {e}"


def test_stated_deadlines_progress_and_other_errors_are_honoured_and_a_lost_store_is_named() -> None:
    assert run_ranks(work_long, 1) == ["RuntimeError: shapes differ"]


def outlive_a_failed_peer() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    board = Board(store)
    board.publish_failure(Status(1, "node1", 1, "", state="failed", operation="step 1", error="DataError: bad shard"))
    me = Status.of_this_process(0)
    watch = Watch(board, me, 2, store_host="here", deadline_s=600, beat_s=0.1, grace_s=0.5)
    watch.start()
    with watch.operation("step 2"):
        time.sleep(600)


def test_after_a_peers_failure_a_hang_ends_long_before_the_deadline() -> None:
    (outcome,) = observe_ranks(outlive_a_failed_peer, 1, deadline_s=30)
    assert outcome.exit_code == WATCHDOG_EXIT_CODE
    assert "after a rank had failed" in outcome.output
    assert 'rank 1 (host node1, pid 1) failed in "step 1"' in outcome.output
    assert "DataError: bad shard" in outcome.output


def wait_behind_a_kernel_that_gave_up(raises: bool) -> None:
    """The host waits for its device; a check can tell after a second that a kernel there has given up."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    board, me = Board(store), Status.of_this_process(0)
    board.publish(Status(1, "node1", 1, ""))
    watch = Watch(board, me, 2, store_host="here", deadline_s=600, beat_s=0.1, grace_s=0.5)
    started = time.monotonic()

    def check() -> None:
        if time.monotonic() - started > 1:
            raise RankFailure("waited for rank 1 on the device")

    watch.add_check(check)
    watch.start()
    with watch.operation("step 2"):
        if raises:
            time.sleep(1.2)
            check()
        time.sleep(600)


def test_what_a_kernel_found_ends_a_host_that_waits_for_its_device() -> None:
    (outcome,) = observe_ranks(wait_behind_a_kernel_that_gave_up, 1, False, deadline_s=30)
    assert outcome.exit_code == WATCHDOG_EXIT_CODE
    assert 'RankFailure: "step 2" on rank 0' in outcome.output
    assert "waited for rank 1 on the device" in outcome.output


def test_a_host_that_finds_it_out_by_itself_raises() -> None:
    (outcome,) = observe_ranks(wait_behind_a_kernel_that_gave_up, 1, True, deadline_s=30)
    assert outcome.exit_code == 1
    assert outcome.traceback.endswith("RankFailure: waited for rank 1 on the device\n")


def go_on_after_a_finding() -> int:
    """Longer than a process with a finding has: by short operations, after a finding that was none, and without the
    check, as a second trainer in a process does."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    watch = Watch(Board(store), Status.of_this_process(0), 1, store_host="here", deadline_s=60, beat_s=0.1, grace_s=1)
    watch.start()
    found = True

    def check() -> None:
        if found:
            raise RankFailure("a kernel has given up")

    watch.add_check(lambda: None)
    remove = watch.add_check(check)
    with watch.operation("with operations"):
        for _ in range(5):
            time.sleep(0.3)
            with watch.operation("inner"):
                pass
        found = False
        time.sleep(0.6)
        found = True
        time.sleep(0.3)
    remove()
    remove()
    with watch.operation("without the check"):
        time.sleep(1.5)
    watch.stop(None)
    return len(watch._checks)


def test_a_finding_ends_no_process_that_goes_on_nor_one_that_has_left_the_check_behind() -> None:
    assert run_ranks(go_on_after_a_finding, 1, deadline_s=30) == [1]


def lose_the_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    own = store.clone()
    own.set_timeout(timedelta(seconds=1))
    watch = Watch(
        Board(own),
        Status.of_this_process(0),
        2,
        store_host="node0:29500",
        deadline_s=60,
        beat_s=0.1,
        grace_s=1,
    )
    watch.start()
    del store
    with (
        pytest.raises(RankFailure, match=r"store of the run \(node0:29500\) cannot be read"),
        watch.operation("x"),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
