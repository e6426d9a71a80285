"""Updates that fail: a bounded error, the old weights intact or nothing served, and the next good update heals."""

import threading
import time
from typing import Any

import pytest
import torch

from equipoise.distributed.weight_update import Manifest, TensorSpec, plan_buckets, receiver
from equipoise.distributed.weight_update.receiver import Target, WeightReceiver
from equipoise.errors import WeightUpdateError
from equipoise.kernels.checksum import checksum
from equipoise.models.initialize import initialize_model
from equipoise.serve.clients.http import EngineError
from unit.engine_rig import TOY, some_ids, trainer_model
from unit.serve_rig import PATHS, client_of, serving, trainer_checksums, updater

GREEDY = {"sampling_params": {"temperature": 0.0, "max_new_tokens": 3}}


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def manifest_of(tensors: dict[str, TensorSpec], version: str = "1", **changes) -> Manifest:
    buckets = plan_buckets(tensors.items(), 10**6)
    return Manifest(**({"version": version, "tensors": tensors, "buckets": buckets} | changes))


WANTED = {"a": spec(2, 3), "b": spec(4, 8, dtype="bfloat16"), "c": spec(5)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": spec(8, 4, dtype="bfloat16")}, r"'b' has shape \[8, 4\], the engine's has \[4, 8\]"),
        ({"d": spec(1)}, "'d' is not a tensor of this engine"),
        ({"b": spec(4, 8)}, "'b' is float32, the engine's is bfloat16"),
        ({"c": None}, "'c' of the engine is left out"),
        ({"b": spec(4, 8, dtype="brain")}, "'b' has dtype 'brain'"),
    ],
)
def test_c29_what_does_not_fit_is_refused_before_anything_is_written(change: dict, message: str) -> None:
    flats = {name: torch.zeros(s.num_rows * s.row_numel, dtype=s.torch_dtype) for name, s in WANTED.items()}
    receiver = WeightReceiver(WANTED, {name: Target(flat, 0) for name, flat in flats.items()})
    tensors = {name: s for name, s in (WANTED | change).items() if s is not None}
    fitting = {name: s for name, s in tensors.items() if s.dtype != "brain"}
    manifest = manifest_of(fitting).model_copy(update={"tensors": tensors})
    with pytest.raises(WeightUpdateError, match=message):
        receiver.begin(manifest)
    assert receiver.dirty is None
    assert receiver.manifest is None
    receiver.begin(manifest_of(WANTED))


def test_c29_mixed_dtypes_in_one_bucket_are_aligned() -> None:
    specs = {"small": spec(3, dtype="uint8"), "wide": spec(2, 3), "half": spec(1, 3, dtype="bfloat16"), "last": spec()}
    values = {
        "small": torch.tensor([1, 2, 255], dtype=torch.uint8),
        "wide": torch.tensor([[1.5, float("nan"), -0.0], [float("inf"), 3.0, 1e-45]]),
        "half": torch.tensor([[1.0, 2.0, -3.0]], dtype=torch.bfloat16),
        "last": torch.tensor(7.0),
    }
    flats = {name: torch.zeros(v.numel(), dtype=v.dtype) for name, v in values.items()}
    receiver = WeightReceiver(specs, {name: Target(flat, 0) for name, flat in flats.items()})
    manifest = manifest_of(specs)
    receiver.begin(manifest)
    (bucket,) = manifest.buckets
    data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for name, _, _, offset in bucket.pieces:
        raw = values[name].reshape(-1).view(torch.uint8)
        data[offset : offset + raw.numel()] = raw
    receiver.load(0, data)
    assert receiver.commit({0: int(checksum(data))}) == "1"
    for name, flat in flats.items():
        assert torch.equal(flat.view(torch.uint8), values[name].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("bucket_bytes", [1, 13, 64, 10**6])
@pytest.mark.parametrize("split", [False, True])
def test_every_row_is_in_one_bucket_and_a_bucket_is_larger_only_for_one_row(bucket_bytes: int, split: bool) -> None:
    tensors = {"a": spec(7, 3), "empty": spec(0, 4), "b": spec(1, 40), "c": spec(), "d": spec(9, dtype="uint8")}
    buckets = plan_buckets(tensors.items(), bucket_bytes, split=split)
    Manifest(version="1", tensors=tensors, buckets=buckets).check_layout()
    for bucket in buckets:
        if bucket.num_bytes > max(bucket_bytes, 16):
            (piece,) = bucket.pieces
            assert not split or piece.num_rows == 1
    assert split or all(piece.row == 0 for bucket in buckets for piece in bucket.pieces)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m["buckets"][0]["pieces"][0].__setitem__(3, 10**9),
        lambda m: m["buckets"][0]["pieces"][0].__setitem__(3, -16),
        lambda m: m["buckets"][0]["pieces"][1].__setitem__(3, 0),
        lambda m: m["buckets"][0]["pieces"][0].__setitem__(2, 1),
        lambda m: m["buckets"][0]["pieces"].append(["ghost", 0, 1, 4096]),
        lambda m: m["buckets"].pop(),
        lambda m: m["buckets"][0].__setitem__("num_bytes", 4),
        lambda m: m.__setitem__("tensors", []),
        lambda m: m["tensors"].__setitem__("a", [[-2, 3], "float32"]),
        lambda m: m.__setitem__("version", ""),
        lambda m: m.pop("buckets"),
        lambda m: m.__setitem__("surprise", 1),
    ],
)
def test_a_manifest_that_is_malformed_is_an_error(spoil) -> None:
    value = manifest_of(WANTED).model_dump(mode="json")
    spoil(value)
    with pytest.raises(WeightUpdateError):
        Manifest.parse(value).check_layout()


def test_c28_all_layers_survive_updates_in_several_buckets() -> None:
    model = trainer_model()
    with serving() as server, updater("colocated", model, server, bucket_bytes=6000) as update:
        for seed in (1, 2):
            initialize_model(model, seed)
            update.update(str(seed))
            assert client_of(server).checksums() == trainer_checksums(model)


def test_an_update_that_does_not_fit_raises_and_the_old_weights_stay_in_service() -> None:
    model, other = trainer_model(), trainer_model(TOY.model_copy(update={"moe_intermediate_size": 8}))
    with serving() as server, updater("colocated", model, server) as update:
        update.update("good")
        client, before = client_of(server), client_of(server).checksums()
        for path in PATHS:
            with (
                updater(path, other, server) as wrong,
                pytest.raises(WeightUpdateError, match=r"has shape .*, the engine's has"),
            ):
                wrong.update("bad")
        assert client.checksums() == before
        assert client.weight_version() == "good"
        assert client.generate([1, 2], **GREEDY)["meta_info"]["weight_version"] == "good"


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_fails_in_the_middle_is_dirty_until_the_next_update(path: str, monkeypatch) -> None:
    model = trainer_model()
    with serving() as server, updater(path, model, server, bucket_bytes=8000) as update:
        update.update("good")
        client, receiver, load = client_of(server), server.worker.receiver, WeightReceiver.load
        initialize_model(model, 1)

        def fail(self, index, data):
            if index == 2:
                raise MemoryError("no room for bucket 2")
            load(self, index, data)

        monkeypatch.setattr(WeightReceiver, "load", fail)
        with pytest.raises(WeightUpdateError, match="no room for bucket 2"):
            update.update("bad")
        monkeypatch.undo()
        assert "no room for bucket 2" in (receiver.dirty or "")
        with pytest.raises(EngineError, match="the weights are not usable") as error:
            client.generate([1, 2], **GREEDY)
        assert error.value.status == 503
        with pytest.raises(EngineError, match="the weights are not usable"):
            client.resume()
        assert client.weight_version() == "good"
        update.update("healed")
        assert client.checksums() == trainer_checksums(model)
        assert client.generate([1, 2], **GREEDY)["meta_info"]["weight_version"] == "healed"


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_answers_500_in_an_update_ends_it_at_once(path: str, monkeypatch) -> None:
    """R12: the sender does not go on waiting in its broadcast, and the next update works."""
    model = trainer_model()
    with serving() as server, updater(path, model, server, bucket_bytes=8000, deadline_s=15.0) as update:
        update.update("good")

        def fail(self, *args):
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(type(server.loop), "receive" if path == "distributed" else "load", fail)
            started = time.monotonic()
            with pytest.raises(WeightUpdateError, match="answered 500: internal error: RuntimeError"):
                update.update("bad")
            assert time.monotonic() - started < 10
        assert client_of(server).weight_version() == "good"
        assert client_of(server).generate([1, 2], **GREEDY)["meta_info"]["weight_version"] == "good"
        initialize_model(model, 1)
        update.update("healed")
        assert client_of(server).checksums() == trainer_checksums(model)


def test_bytes_that_changed_on_the_way_are_noticed(monkeypatch) -> None:
    model = trainer_model()
    with serving() as server, updater("colocated", model, server) as update:
        update.update("good")
        load = WeightReceiver.load

        def flip(self, index, data):
            changed = data.clone()
            changed[5] ^= 1
            load(self, index, changed)

        monkeypatch.setattr(WeightReceiver, "load", flip)
        with pytest.raises(WeightUpdateError, match="arrived with other bytes than were sent"):
            update.update("bad")
        monkeypatch.undo()
        assert server.loop.dirty is not None
        update.update("healed")
        assert server.loop.dirty is None


@pytest.mark.parametrize("path", PATHS)
def test_a_trainer_that_stops_in_the_middle_leaves_a_bounded_wait(path: str, monkeypatch) -> None:
    """The engine gives up at its deadline; the next trainer takes over."""
    model = trainer_model()
    with serving(deadline_s=2.0) as server:
        first = updater(path, model, server, bucket_bytes=8000)
        first.update("good")
        fill, reached = type(first)._fill, threading.Event()

        def stop(self, index, out, phases, **options):
            if index == 2:
                reached.set()
                raise KeyboardInterrupt
            return fill(self, index, out, phases, **options)

        monkeypatch.setattr(type(first), "_fill", stop)
        monkeypatch.setattr(type(first), "_give_up", lambda self, error: None)  # as if it were killed
        with pytest.raises(KeyboardInterrupt):
            first.update("bad")
        monkeypatch.undo()
        initialize_model(model, 1)
        with updater(path, model, server) as second:
            second.update("healed")
        assert client_of(server).checksums() == trainer_checksums(model)
        assert client_of(server).weight_version() == "healed"
        with pytest.raises(EngineError):  # the first one comes back
            first.clients[0].commit(None, {})


def test_pausing_twice_and_going_on_twice_is_harmless() -> None:
    model = trainer_model()
    with serving() as server, updater("colocated", model, server) as update:
        update.update("1")
        client = client_of(server)
        for _ in range(2):
            client.pause()
        with pytest.raises(EngineError, match="generation is paused") as error:
            client.generate([1], **GREEDY)
        assert error.value.status == 503
        for _ in range(2):
            client.resume()
        assert client.generate(some_ids(3), **GREEDY)["output_ids"]


def test_an_update_in_place_while_requests_run_ends_and_they_go_on() -> None:
    """Requests that were running are finished by the new weights."""
    model = trainer_model()
    with serving() as server:
        client = client_of(server, pause_mode="in_place")
        with updater("colocated", model, server) as update:
            update.update("1")
            update.clients[0]._pause_mode = "in_place"
            answers = []
            slow = threading.Thread(
                target=lambda: answers.append(
                    client.generate([1, 2, 3], sampling_params={"max_new_tokens": 55, "sampling_seed": 1})
                )
            )
            slow.start()
            while not server.loop.num_requests:
                pass
            update.update("2")
            slow.join(20)
        (answer,) = answers
        assert len(answer["output_ids"]) == 55
        assert answer["meta_info"]["weight_versions"][-1][0] == "2"


def test_two_engines_are_updated_together_and_a_dead_one_is_named() -> None:
    model = trainer_model()
    with serving() as one, serving() as two:
        for path in PATHS:
            with updater(path, model, one, two) as update:
                update.update(path)
            assert client_of(one).weight_version() == client_of(two).weight_version() == path
        with updater("distributed", model, one, two) as update:
            update.clients[1]._http.url = "http://127.0.0.1:1"
            object.__setattr__(
                update.clients[1]._http, "_parts", update.clients[1]._http._parts._replace(netloc="127.0.0.1:1")
            )
            with pytest.raises(WeightUpdateError, match="no answer"):
                update.update("lost")
        assert client_of(one).generate([1], **GREEDY)["meta_info"]["weight_version"] == "distributed"


def test_empty_buckets_keep_a_rank_in_step() -> None:
    """A15: a rank with nothing in a step takes part all the same."""
    from equipoise.accelerator import CPUAccelerator
    from equipoise.distributed.weight_update import Intake, Offer
    from equipoise.distributed.weight_update.colocated import EMPTY, READY, TAKEN
    from equipoise.distributed.weight_update.shared_memory import Segment

    flats = {name: torch.zeros(s.num_rows * s.row_numel, dtype=s.torch_dtype) for name, s in WANTED.items()}
    receiver = WeightReceiver(WANTED, {name: Target(flat, 0) for name, flat in flats.items()})
    manifest = Manifest(version="1", tensors=WANTED, buckets=plan_buckets(WANTED.items(), 1, split=False))
    receiver.begin(manifest)
    slot = 4096
    memory, counts = Segment(2 * slot), Segment(8 * (TAKEN + 1))
    numbers = counts.tensor.view(torch.int64)
    numbers.zero_()
    steps = [EMPTY, 0, EMPTY, 1, 2, EMPTY]
    places = {"num_slots": 2, "slot_bytes": slot}
    offer = Offer(memory=memory.handle(), counts=counts.handle(), buckets=steps, reader=0, **places)
    intake = Intake(receiver, CPUAccelerator(), torch.device("cpu"), 10)
    taking = threading.Thread(target=intake.take_shared, args=(offer, lambda: False))
    taking.start()
    sums = {}
    for number, index in enumerate(steps):
        while int(numbers[TAKEN]) < number - 1:
            pass
        if index != EMPTY:
            data = memory.tensor[number % 2 * slot :][: manifest.buckets[index].num_bytes].zero_()
            for first, size in manifest.buckets[index].spans(WANTED):
                data[first : first + size] = torch.arange(size) % 7 + index
            sums[index] = int(checksum(data))
        numbers[READY] = number + 1
    taking.join(10)
    assert int(numbers[TAKEN]) == len(steps)
    assert receiver.commit(sums) == "1"
    memory.close()
    counts.close()
    one = Manifest(version="1", tensors={}, buckets=[{"num_bytes": 0, "pieces": []}], partial=True)
    receiver.begin(one)
    receiver.load(0, torch.empty(0, dtype=torch.uint8))
    assert receiver.commit({0: 0}) == "1"


def test_a_bucket_that_arrives_while_the_first_one_begins_keeps_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two senders' buckets are loaded by two threads, which may meet anywhere."""
    specs = {name: TensorSpec(dtype="float32", shape=(4,)) for name in ("a", "b")}
    buckets = [bucket for name in specs for bucket in plan_buckets([(name, specs[name])], 10**6)]
    parameters = {name: torch.zeros(4) for name in specs}
    wr = WeightReceiver(specs, {name: Target(parameters[name], 0) for name in specs})
    wr.begin(Manifest(version="1", tensors=specs, buckets=buckets))
    data = [torch.arange(1, bucket.num_bytes + 1, dtype=torch.uint8) for bucket in buckets]
    new_totals = receiver.new_totals

    def meet(*args: Any) -> torch.Tensor:
        monkeypatch.setattr(receiver, "new_totals", new_totals)
        wr.load(1, data[1])
        return new_totals(*args)

    monkeypatch.setattr(receiver, "new_totals", meet)
    wr.load(0, data[0])
    assert wr.commit({number: int(checksum(data[number])) for number in (0, 1)}) == "1"
    for number, name in enumerate(specs):
        assert torch.equal(parameters[name].view(torch.uint8), data[number][:16])


def test_two_senders_whose_groups_meet_in_opposite_order_do_not_deadlock() -> None:
    """Two groups over two engines, joined in opposite orders and used in opposite orders."""
    from equipoise.accelerator import CPUAccelerator
    from equipoise.distributed.weight_update import UpdateGroup
    from equipoise.distributed.weight_update.group import serve_store

    with serving() as one, serving() as two:
        engines = [client_of(one), client_of(two)]
        stores = [serve_store("127.0.0.1", 20) for _ in range(2)]
        groups: dict[int, UpdateGroup] = {}

        def join(sender: int, order: list[int]) -> None:
            calls = []
            for engine in order:
                args = ("127.0.0.1", stores[sender].port, 1 + engine, 3, f"g{sender}", "gloo")
                calls.append(threading.Thread(target=engines[engine].join_group, args=args))
                calls[-1].start()
            groups[sender] = UpdateGroup(CPUAccelerator(), f"g{sender}", stores[sender], 0, 3, 20)
            for call in calls:
                call.join(20)

        meeting = [threading.Thread(target=join, args=(0, [0, 1])), threading.Thread(target=join, args=(1, [1, 0]))]
        for thread in meeting:
            thread.start()
        for thread in meeting:
            thread.join(20)
        assert sorted(groups) == [0, 1]
        specs = dict(one.worker.receiver.specs)
        names = list(specs)
        half = len(names) // 2
        buckets = [
            *plan_buckets(((n, specs[n]) for n in names[:half]), 10**9),
            *plan_buckets(((n, specs[n]) for n in names[half:]), 10**9),
        ]
        manifest = Manifest(version="both", tensors=specs, buckets=buckets)
        for client in engines:
            client.pause()
            client.begin(manifest)
        calls = [
            threading.Thread(target=engines[engine].receive, args=(manifest, f"g{sender}", [sender]))
            for engine, sender in ((0, 0), (1, 1), (0, 1), (1, 0))
        ]
        for call in calls:
            call.start()
        data = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in buckets]
        for number, bucket in enumerate(buckets):
            for first, size in bucket.spans(specs):
                data[number][first : first + size] = 7 + number
        for sender in (1, 0):
            groups[sender].broadcast(data[sender]).wait()
        for call in calls:
            call.join(20)
        sums = {index: int(checksum(bucket)) for index, bucket in enumerate(data)}
        for client in engines:
            client.commit(manifest, sums)
            assert client.weight_version() == "both"
        for group in groups.values():
            group.close(abort=True)
