"""The environment server: ROUTER and msgpack, `health`, `run` and `cancel`. `fault` in its settings says what goes wrong."""

from __future__ import annotations

import json
import os
import queue
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zmq

pack = msgspec.msgpack.encode
_IDS = {sign: number for number, sign in enumerate("0123456789+-*=", start=1)}  # of the model that ships with LlamaRL


def serve_env(*, max_workers: int, address: str, address_queue: Any, config: dict[str, Any]) -> None:
    fault, flag = config.get("fault", ""), Path(config.get("flag", "none"))
    if fault == "starts once":
        if flag.exists():
            raise OSError("this starts once")
        flag.touch()
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    address_queue.put(router.getsockopt_string(zmq.LAST_ENDPOINT))
    outgoing: queue.Queue[list[bytes]] = queue.Queue()
    with ThreadPoolExecutor(8) as threads:
        while True:
            while not outgoing.empty():
                router.send_multipart(outgoing.get())
            if not router.poll(5):
                continue
            client, number, method, payload = router.recv_multipart()
            if fault == "hang" and method == b"run":
                time.sleep(3600)
            if fault == "dies once" and method == b"run" and not flag.exists():
                flag.touch()
                os._exit(1)
            if method == b"run":
                threads.submit(run, msgspec.msgpack.decode(payload), [client, number], outgoing, fault)
            else:
                outgoing.put([client, number, b"reply", pack({"success": True, "error": None})])


def run(request: dict[str, Any], to: list[bytes], outgoing: queue.Queue[list[bytes]], fault: str) -> None:
    prompt = [_IDS[sign] for sign in request["task_data"]["prompt"]]
    try:
        answer = generate(request, prompt)
    except OSError as error:
        outgoing.put([*to, b"reply", pack({"success": False, "error": str(error)})])
        return
    sampled = answer["token_ids"]
    logprobs = [one["logprob"] for one in answer["logprobs"]["content"]]
    if fault == "another token":
        sampled = [sampled[0] % 9 + 1, *sampled[1:]]
    if fault == "hides an answer":
        generate(request, [*prompt, *sampled])
    nodes = [
        {"parent": None, "sampled": False, "token_ids": prompt[:1], "mask": [False], "logprobs": []},
        {
            "parent": 0,
            "sampled": True,
            "token_ids": [*prompt[1:], *sampled],
            "mask": [False] * (len(prompt) - 1) + [True] * len(sampled),
            "logprobs": logprobs,
        },
    ]
    score = float("inf") if fault == "infinite reward" else float(len(sampled))
    rewards = {"length": {"score": score, "weight": 0.5}}
    opened = {"trace": "t", "open": {"id": "t"}, "nodes": nodes, "calls": [{"node": 1}], "links": {1: []}}
    outgoing.put([*to, b"delta", pack(opened)])
    outgoing.put([*to, b"delta", pack({"trace": "t", "set": {"rewards": rewards, "ok": True}})])
    reply = {"success": True, "error": None, "head": {"ok": True, "errors": []}}
    outgoing.put([*to, b"reply", pack({**reply, "traces": [{"id": "t", "nodes": 2, "calls": 1}]})])


def generate(request: dict[str, Any], tokens: list[int]) -> Any:
    client = request["client"]
    assert client["type"] == "train" and client["renderer_model_name"]
    body = {"model": request["model"], "token_ids": tokens, "sampling_params": {**request["sampling"], "logprobs": 1}}
    url = client["base_url"].removesuffix("/v1") + "/inference/v1/generate"
    headers = {"Content-Type": "application/json", **client["headers"]}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
        return json.load(answer)["choices"][0]
