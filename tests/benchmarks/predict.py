"""Latency of one CartPole action, relative to the forward pass of the network with conversion from and to NumPy.

Times are CPU times of the thread, so that other programs disturb them little; those of the web service are wall times.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Run, in_turns
from sizes import size
from torch import nn

import rein

CALLS: int = size(100, 3)
REPEATS: int = size(21, 1)
FORWARD = "forward pass of the network"
OBSERVATION = np.array([0.1, 0.2, 0.3, 0.4], np.float32)


def ways(agent: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that compute one action, by name."""
    policy, networks = agent.policy(), agent.networks
    online = getattr(networks, "online", networks)
    sizes = [4, *agent.hidden]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    layered = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))

    def tensor() -> torch.Tensor:
        return torch.from_numpy(OBSERVATION).unsqueeze(0)

    @torch.no_grad()
    def forward() -> Any:
        if online is networks:
            return networks.policy(networks.preprocess(tensor()))[0].mode().numpy()
        return online(online.preprocess(tensor())).argmax(1).numpy()

    @torch.no_grad()
    def plain() -> Any:
        return layered(tensor()).argmax(1).numpy()

    found: dict[str, Callable[[], Any]] = {
        FORWARD: forward,
        "policy.predict": lambda: policy.predict(OBSERVATION),
        "policy.select_action": lambda: policy.select_action(tensor()),
        "torch.nn.Sequential of the same layers": plain,
    }
    try:
        import onnxruntime

        rein.export(policy, folder / "policy.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(folder / "policy.onnx"), options)
        found["ONNX session.run"] = lambda: session.run(None, {"observation": OBSERVATION[None]})
    except ImportError:
        pass
    return found


def repeated(function: Callable[[], Any]) -> Run:
    """Return a function that calls another one a number of times."""

    def run(calls: int) -> None:
        for _ in range(calls):
            function()

    return run


def service(policy: Any, forward: Run) -> dict[str, float]:
    """Return the wall time of an answer of a web service, to one client and to eight at once, relative to `forward`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet for each answer

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            content = str(policy.predict(np.frombuffer(body, np.float32))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(calls: int) -> None:
            connection = HTTPConnection("127.0.0.1", server.server_port)
            for _ in range(calls):
                connection.request("POST", "/", OBSERVATION.tobytes())
                connection.getresponse().read()
            connection.close()

        def together(calls: int) -> None:
            with ThreadPoolExecutor(8) as clients:
                list(clients.map(ask, [calls] * 8))

        runs = {"forward": forward, "web service, one client": ask, "web service, eight clients": together}
        found = in_turns(runs, dict.fromkeys(runs, CALLS), REPEATS, time.perf_counter)
        server.shutdown()
    found["web service, eight clients"] /= 8
    return {name: each / found["forward"] for name, each in found.items() if name != "forward"}


def main() -> None:
    """Print a table of the ratios."""
    torch.set_num_threads(1)
    env = rein.envs.CartPole(1)
    with tempfile.TemporaryDirectory() as folder:
        for agent in (rein.PPO(env, seed=0), rein.DQN(env, seed=0)):
            runs = {name: repeated(function) for name, function in ways(agent, Path(folder)).items()}
            seconds = in_turns(runs, dict.fromkeys(runs, CALLS), REPEATS, time.thread_time)
            forward = seconds[FORWARD]
            ratios = {name: each / forward for name, each in seconds.items()}
            ratios |= service(agent.policy(), runs[FORWARD])
            print(f"\n{type(agent).__name__}: forward pass {forward * 1e6:.0f} us\n\n| | ratio |\n|---|---|")
            print("\n".join(f"| {name} | {ratio:.2f} |" for name, ratio in ratios.items()), flush=True)


if __name__ == "__main__":
    main()
