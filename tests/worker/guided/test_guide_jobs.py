"""The jobs of a helper that guides an answer: what is encoded is decoded."""

from services.core.request import Guided, GuidedKind
from services.worker.guided.guide_jobs import (
    Step,
    decode_compilation,
    decode_step,
    decode_token,
    decode_vocabulary,
    encode_compilation,
    encode_step,
    encode_token,
    encode_vocabulary,
)


def test_every_message_survives_its_encoding() -> None:
    guided = Guided(GuidedKind.CHOICE, ("é", '"\0\n', "\ud800"))
    step = Step(b"\x00\xff", is_complete=True)

    assert decode_vocabulary(encode_vocabulary([b"\xff", b""], {3, 2})) == ([b"\xff", b""], [2, 3])
    assert decode_compilation(encode_compilation(guided, [1, 2])) == (guided, [1, 2])
    assert decode_token(encode_token(2**32 - 1)) == 2**32 - 1
    assert decode_step(encode_step(step)) == step
