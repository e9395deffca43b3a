"""A page in Chromium that reads an answer with EventSource: `client.py STEP URL QUESTION`.

It prints the lines of JSON that page.html reports, which also says what the steps do. The page's origin is not URL's.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlencode

END = "end"
OPTIONS = (
    "--headless",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",  # Containers have little shared memory.
    "--disable-gpu",
)
CLOSE_S_MAX = 10.0
PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""

Reports = Queue[dict[str, Any]]


def main() -> None:
    """Open the page, and close the browser once the page says that it is done."""
    reports: Reports = Queue()
    folder = str(Path(__file__).parent)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Origin, reports, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    query = urlencode(dict(zip(("step", "url", "question"), sys.argv[1:], strict=True)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = start(f"http://127.0.0.1:{server.server_port}/page.html?{query}", profile)
        threading.Thread(target=wait, args=(browser, reports), daemon=True).start()
        while (report := reports.get())["step"] != END:
            print(json.dumps(report), flush=True)
        browser.terminate()
        browser.wait(CLOSE_S_MAX)
    if "error" in report:
        sys.exit(f"error: {report['error']}")


def start(page: str, profile: str) -> "subprocess.Popen[bytes]":
    """Start a browser, which dies with this process."""
    libc = ctypes.CDLL(None)
    options = [*OPTIONS, f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium has none for root.
    die_with_parent = partial(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    return subprocess.Popen(["chromium", *options, page], preexec_fn=die_with_parent)


def wait(browser: "subprocess.Popen[bytes]", reports: Reports) -> None:
    """Report the end of the browser."""
    reports.put({"step": END, "error": f"the browser ended with status {browser.wait()}"})


class Origin(SimpleHTTPRequestHandler):
    """Serves the page, and takes its reports."""

    def __init__(self, reports: Reports, *arguments: Any, **more: Any) -> None:
        self._reports = reports
        super().__init__(*arguments, **more)

    def do_POST(self) -> None:
        """Take a report."""
        self._reports.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    main()
