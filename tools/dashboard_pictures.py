"""Takes the pictures of the live page that docs/operations.md shows, of a server that is running and has guesses:

    make serve          (in another terminal; with guesses)
    python tools/dashboard_pictures.py http://127.0.0.1:8080 docs/operations

Sends some chats first, so that there is something to see, and one through the playground.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

LOAD_SECONDS = 75
PROMPTS = (
    "Write a Python class for a stack, then write it again with type hints.",
    "Say this five times: the quick brown fox jumps over the lazy dog.",
    "Tell me a story about a fox and a hound.",
)
SHOWN = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."
COLOURS = 256
VIEWS = (("light", 1280, False), ("dark", 390, True))
"""name, width and whether it is dark: a desk by day and a telephone by night"""


def _browser() -> Any:
    spec = importlib.util.spec_from_file_location("browser", Path(__file__).parent / "browser.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def ask(session: aiohttp.ClientSession, url: str, client: int) -> None:
    """A client that asks one question after the other."""
    end = asyncio.get_running_loop().time() + LOAD_SECONDS
    for turn in range(1000):
        if asyncio.get_running_loop().time() > end:
            return
        await asyncio.sleep(1 + client)
        message = {"role": "user", "content": PROMPTS[(client + turn) % len(PROMPTS)]}
        body = {"messages": [message], "max_tokens": 80 + 40 * client, "temperature": 0, "stream": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            await response.read()


async def take(page: Any, folder: Path) -> None:
    await page.run(f"document.getElementById('prompt').value = {SHOWN!r}; document.getElementById('most').value = 100")
    await page.run("document.getElementById('go').click()")
    await page.until("document.getElementById('stop').disabled", 120)
    for name, width, dark in VIEWS:
        await page.view(width, 900, dark=dark)
        await asyncio.sleep(2)
        tall = await page.run("Math.ceil(document.body.getBoundingClientRect().height)")
        await page.view(width, tall, dark=dark)
        await asyncio.sleep(2)
        path = folder / f"dashboard-{name}.png"
        await page.picture(path)
        Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


async def main(url: str, folder: Path) -> None:
    browser = _browser()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser.started(Path(profile)) as port:
        async with aiohttp.ClientSession() as session, browser.tab(port) as page:
            await page.view(1280, 900)
            await page.open(url + "/dashboard")
            busy = [asyncio.create_task(ask(session, url, client)) for client in range(3)]
            await asyncio.sleep(LOAD_SECONDS * 0.7)
            await take(page, folder)
            for one in busy:
                one.cancel()
            await asyncio.gather(*busy, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1].rstrip("/"), Path(sys.argv[2])))
