"""`equipoise serve` as a user starts it: a Hugging Face folder, one process or two, until a signal."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import torch

from unit.engine_rig import some_ids
from unit.test_hf_parity import hf_model

ROOT = Path(__file__).resolve().parents[2]


def post(url: str, path: str, body: dict, token: str = "") -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_folder_is_served_until_a_signal(processes: int, tmp_path: Path) -> None:
    theirs = hf_model().eval()
    theirs.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "equipoise", "serve", str(tmp_path / "model"), "--port", "0"]
    command += ["--nproc-per-node", str(processes), "--context-length", "64"]
    variables = {"PYTHONPATH": str(ROOT / "src"), "EQUIPOISE_ACCELERATOR": "cpu", "XDG_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.Popen(
        command, env=os.environ | variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    killer = threading.Timer(150, process.kill)
    killer.start()
    lines: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "admin token in" in line:
                break
        text = "".join(lines)
        url = re.search(r"on (http://127\.0\.0\.1:\d+)", text)
        token = re.search(r"admin token in (\S+)", text)
        assert url and token, text  # noqa: PT018
        token_file = Path(token[1])
        assert token_file.stat().st_mode & 0o077 == 0
        ids = some_ids(6)
        with torch.no_grad():
            options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
            expected = theirs.generate(torch.tensor([ids]), **options)[0].tolist()
        params = {"temperature": 0.0, "max_new_tokens": 8}
        answer = post(url[1], "/generate", {"input_ids": ids, "sampling_params": params})
        assert ids + answer["output_ids"] == expected
        body = {"mode": "abort"}
        assert post(url[1], "/pause_generation", body, token_file.read_text())["success"]
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[1]
        assert process.returncode in (0, 128 + signal.SIGTERM), rest
        assert "Traceback" not in rest
        assert not token_file.exists()
    finally:
        killer.cancel()
        process.kill()
        process.communicate()
