"""The bytes of a streamed answer, as a server writes them."""

import json
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def chunk(**content: Any) -> bytes:
    event = b"data: %b\n\n" % json.dumps(content).encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def token(text: str) -> bytes:
    return chunk(choices=[{"index": 0, "text": text}])


USAGE = chunk(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7})
