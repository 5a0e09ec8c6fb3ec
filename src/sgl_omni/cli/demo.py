"""`sgl-omni demo`: the built-in voice on a free port, one sentence into a file, two figures."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import wave
from pathlib import Path

import click
import httpx

from sgl_omni.cli.options import writable_file

SENTENCE = "Hello! This is a small voice on a small machine, and every stage of it runs in a process of its own."
START_SECONDS = 120.0


@click.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("hello.wav"),
    show_default=True,
    callback=writable_file,
)
@click.option("--text", default=SENTENCE, show_default=True, help="What to say.")
@click.option("--voice", default=None, help="One of the built-in voices.")
@click.option("--port", default=0, show_default=True, help="0 takes a free one.")
@click.option("--once", is_flag=True, envvar="DEMO_ONCE", help="Stop after the sentence (also by DEMO_ONCE=1).")
def command(out: Path, text: str, voice: str | None, port: int, once: bool) -> None:
    """Starts the built-in voice, speaks one sentence into a WAV file and goes on serving until Ctrl-C.

    Prints the layout, the time to first audio and the real-time factor (time to speak / length of the speech).
    """
    port = port or free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "sgl_omni.cli.main", "serve", "--model-path", "demo-voice", "--port", str(port)],
        start_new_session=True,  # Ctrl-C is ours to pass on, once
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url)
        speak(url, text, voice, out)
        if not once:
            click.echo(f"\nServing on {url} until Ctrl-C. Try:\n")
            click.echo(f"  curl {url}/v1/audio/speech -H 'Content-Type: application/json' \\")
            click.echo('    -d \'{"model": "demo-voice", "input": "Good morning.", "response_format": "wav"}\' > a.wav')
            server.wait()
    except KeyboardInterrupt:
        click.echo("\nstopping")
    finally:
        stop(server)
    if server.returncode not in (0, None):
        raise click.ClickException(f"the server ended with status {server.returncode}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Returns when /health says so; fails when the server ends before."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise click.ClickException(f"the server ended with status {server.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.1)
    raise click.ClickException(f"the server was not ready within {START_SECONDS:g} s")


def speak(url: str, text: str, voice: str | None, out: Path) -> None:
    """Streams one sentence into `out` and prints its figures."""
    voices = httpx.get(f"{url}/v1/audio/voices").json()
    request = {"model": "demo-voice", "input": text, "voice": voice or voices["default"], "response_format": "pcm"}
    httpx.post(f"{url}/v1/audio/speech", json={**request, "input": "Warm up."}, timeout=60).raise_for_status()
    start = time.monotonic()
    first = 0.0
    audio = bytearray()
    with httpx.stream("POST", f"{url}/v1/audio/speech", json=request, timeout=60) as response:
        if response.status_code != 200:
            raise click.ClickException(json.dumps(json.loads(response.read())))
        rate = int(response.headers["X-Sample-Rate"])
        for piece in response.iter_bytes():
            first = first or time.monotonic() - start
            audio += piece
    took = time.monotonic() - start
    with wave.open(os.fspath(out), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(audio)
    seconds = len(audio) / 2 / rate
    click.echo(f"\nsaid:                {text}")
    click.echo(f"wrote:               {out} ({seconds:.2f} s of speech, voice {request['voice']})")
    click.echo(f"time to first audio: {first * 1000:.0f} ms")
    click.echo(f"real-time factor:    {took / seconds:.3f} ({took:.2f} s for {seconds:.2f} s)")


def stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
