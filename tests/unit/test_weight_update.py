"""Updates of an engine's weights over both paths: every byte arrives, under one version, or nothing is served."""

import gc
import os
from pathlib import Path

import pytest
import torch

from equipoise.distributed.weight_update.shared_memory import segments
from equipoise.models.initialize import initialize_model
from equipoise.serve.clients.http import EngineError
from unit.engine_rig import TOY, engine_of, generate, prompt, some_ids, trainer_model
from unit.serve_rig import PATHS, client_of, serving, trainer_checksums, updater


@pytest.mark.parametrize("bucket_bytes", [1000, 10**9])
@pytest.mark.parametrize("path", PATHS)
def test_every_tensor_arrives_whatever_the_bucket(path: str, bucket_bytes: int) -> None:
    model = trainer_model()
    with serving() as server:
        client = client_of(server)
        update = updater(path, model, server, bucket_bytes=bucket_bytes)
        for seed in (0, 1):
            initialize_model(model, seed)
            report = update.update(f"v{seed}")
            assert client.checksums() == trainer_checksums(model)
            assert client.weight_version() == report.version == f"v{seed}"
        assert report.extra_bytes <= 2 * max(bucket_bytes, TOY.vocab_size * TOY.hidden_size * 4) + 8192
        update.close()
        fresh = generate(engine_of(model), prompt(some_ids(9), seed=3, logprob_start=9))["r"]
        params = {"temperature": 0.7, "sampling_seed": 3, "max_new_tokens": 5}
        answer = client.generate(some_ids(9), sampling_params=params)
        assert answer["output_ids"] == fresh.output_ids
        assert answer["meta_info"]["weight_version"] == "v1"


def test_both_paths_send_the_same_names_with_the_same_bytes() -> None:
    model = trainer_model(TOY.model_copy(update={"tie_word_embeddings": True}))
    found = []
    for path in PATHS:
        with serving(model.config) as server, updater(path, model, server) as update:
            update.update("1")
            found.append(client_of(server).checksums())
    assert found[0] == found[1] == trainer_checksums(model)
    assert "lm_head.weight" not in found[0]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("path", PATHS)
def test_fifty_updates_leave_nothing_behind(path: str) -> None:
    model = trainer_model()
    with serving() as server:
        update = updater(path, model, server, bucket_bytes=20000)
        seen, memory = [], []
        for number in range(50):
            with torch.no_grad():
                model.lm_head.weight += 1
            update.update(str(number))
            if number in (9, 49):
                gc.collect()
                memory.append(resident_bytes())
                seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(segments())))
        assert client_of(server).checksums() == trainer_checksums(model)
        assert seen[0][1:] == seen[1][1:]
        assert memory[1] - memory[0] < 8 * 2**20  # forty updates of 0.1 MB each, with all that they leave in caches
        assert abs(seen[0][0] - seen[1][0]) <= 3  # connections come and go
        update.close()
    assert not [name for name in segments() if f"-{os.getpid()}-" in name]


def test_requests_under_way_go_on_with_the_new_weights() -> None:
    """KV cache and version belong together: what is drawn after the update is a fresh engine's."""
    model = trainer_model()
    with serving() as server, updater("colocated", model, server) as update:
        client = client_of(server)
        update.update("old")
        initialize_model(model, 5)
        update.update("new")
        params = {"temperature": 0.0, "max_new_tokens": 6}
        first = client.generate(some_ids(12), sampling_params=params)
        again = client.generate(some_ids(12), sampling_params=params)
        assert first["output_ids"] == again["output_ids"]
        assert (first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]) == (0, 11)
        initialize_model(model, 6)
        update.update("newest")
        after = client.generate(some_ids(12), sampling_params=params)
        fresh = generate(engine_of(model), prompt(some_ids(12), temperature=0.0, max_new_tokens=6))["r"]
        assert after["output_ids"] == fresh.output_ids
        assert after["meta_info"]["cached_tokens"] == 0


def test_before_the_first_update_nothing_is_generated() -> None:
    with serving() as server, pytest.raises(EngineError, match="no weights have been loaded") as error:
        client_of(server).generate([1, 2])
    assert error.value.status == 503


def test_released_weights_give_their_memory_back_also_after_an_update() -> None:
    """Nothing that an update keeps for the next one may hold on to them. (The C library returns freed memory for sure
    where it came in pieces of more than 32 MB: the embedding and the head have 38 each.)"""
    model = trainer_model(TOY.model_copy(update={"vocab_size": 300_000}))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with serving(model.config) as server, updater("colocated", model, server, bucket_bytes=10**8) as update:
        client = client_of(server)
        for version in ("1", "2"):
            update.update(version)
            client.pause()
            gc.collect()
            before = resident_bytes()
            client.release_memory()
            gc.collect()
            assert before - resident_bytes() > 0.8 * size
            client.resume_memory()
        update.update("3")
        assert client.checksums() == trainer_checksums(model)
