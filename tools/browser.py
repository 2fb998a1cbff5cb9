"""A headless Chromium, driven through its DevTools protocol: open a page, run scripts in it, take pictures, list what it asked for.

Knows nothing of our pages. Needs `chromium` (Debian's package) or `google-chrome`; nothing outside this machine can be reached from it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

START_SECONDS = 60.0
ASK_SECONDS = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def found() -> str | None:
    """The browser's path; None when there is none."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Page:
    """One tab. `asked`: the address of every request it made; `errors`: what went wrong in its scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.asked: list[str] = []
        self.errors: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if (answer := self._answers.pop(said.get("id", 0), None)) is not None:
                if not answer.done():
                    answer.set_result(said)
                continue
            told = said.get("params", {})
            match said.get("method"):
                case "Network.requestWillBeSent":
                    self.asked.append(told["request"]["url"])
                case "Runtime.exceptionThrown":
                    details = told["exceptionDetails"]
                    self.errors.append(details.get("exception", {}).get("description", details["text"]))
                case "Log.entryAdded" if told["entry"]["level"] == "error":
                    self.errors.append(told["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, ASK_SECONDS)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']['message']}")
        return said["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression. Raises RuntimeError with what it threw."""
        said = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"]["exception"]["description"])
        return said["result"].get("value")

    async def until(self, condition: str, seconds: float = ASK_SECONDS) -> None:
        """Until an expression is true. Raises TimeoutError that names it."""
        end = asyncio.get_running_loop().time() + seconds
        while not await self.run(condition):
            if asyncio.get_running_loop().time() > end:
                raise TimeoutError(f"never true: {condition}")
            await asyncio.sleep(0.05)

    async def view(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        phone = width < 600
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def key(self, key: str, *, code: int = 0, modifiers: int = 0, text: str = "") -> None:
        """Press one. `modifiers`: 2 = Ctrl."""
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(said["data"]))

    async def close(self) -> None:
        await self._socket.close()
        await self._reader


@contextlib.contextmanager
def started(profile: Path) -> Iterator[int]:
    """A browser, by the port of its DevTools. `profile`: an empty folder for what it writes. Raises RuntimeError when there is none."""
    path = found()
    if path is None:
        raise RuntimeError("no Chromium here: install Debian's package `chromium`")
    quiet = subprocess.DEVNULL
    process = subprocess.Popen((path, *FLAGS, f"--user-data-dir={profile}", "about:blank"), stdout=quiet, stderr=quiet)
    try:
        yield _port(profile / "DevToolsActivePort", process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def tab(port: int) -> AsyncIterator[Page]:
    """A tab of its own in such a browser."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.put("/json/new?about:blank") as response:
            address = (await response.json(content_type=None))["webSocketDebuggerUrl"]
        async with session.ws_connect(address, max_msg_size=0) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Network", "Log"):
                await page.call(f"{domain}.enable")
            yield page
            with contextlib.suppress(RuntimeError, TimeoutError):
                await page.call("Page.close")
            await page.close()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    """Where it listens: it says so in a file once it does."""
    end = time.monotonic() + START_SECONDS
    while True:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= 2:
            return int(lines[0])
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended at once with {process.returncode}")
        if time.monotonic() > end:
            raise TimeoutError("the browser does not listen")
        time.sleep(0.05)
