"""The mocker: a fast engine whose tokens reveal any error in a stream, for tests, benchmarks and demonstrations.

Token k is a hash of all token ids before it (prompt and generated), of the sampling parameters and, unless the
temperature is 0, of the seed. A token that is lost, duplicated or out of order therefore changes all later tokens, and
a continuation that equals the uninterrupted answer was continued exactly. The text consists of letters, some accents,
CJK and emoji, with one byte for each token, so characters are often split over several tokens.
"""

from services.worker.engines.mocker.engine import MockerConfig, MockerEngine
from services.worker.engines.mocker.faults import Faults

__all__ = ["Faults", "MockerConfig", "MockerEngine"]
