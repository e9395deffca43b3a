"""The mocker: a fast engine whose tokens prove themselves, for tests, benches and trying things out.

Token k is a hash of all token ids before it (prompt and generated), of the sampling parameters and, unless the
temperature is 0, of the seed. So any token that is lost, doubled or out of order changes everything after it, and a
continuation that equals the undisturbed answer was continued exactly. Text is letters, some accents, CJK and emoji, one
byte a token: characters are split over tokens all the time.
"""

from services.worker.engines.mocker.engine import MockerConfig, MockerEngine
from services.worker.engines.mocker.faults import Faults

__all__ = ["Faults", "MockerConfig", "MockerEngine"]
