"""Asks TensorRT-LLM questions that only a real GPU can answer, and compares the answers with our worker's assumptions.

    python3 tests/gpu/smoke.py --model /model

It needs nothing but TensorRT-LLM, so it runs in NVIDIA's unmodified container. It loads the model once, which takes
minutes, and kills the engine at the end. It exits with 0 if all assumptions hold, and with 1 otherwise: then change the
worker, or do not use it.
"""

import argparse
import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH_SIZE = 2
CONTEXT_LENGTH = 2048
LONG = 1500
"""Tokens of an answer that must not end by itself."""
ANSWER = 32
TEXT = "The sea covers most of the earth, and most of it has never been seen by anybody. " * 6
"""A prompt of more than two cache blocks."""
ABORT_S = 2.0
"""How long the worker waits for an aborted request: `abort_s` in services/worker/engines/trtllm/options.py."""


@dataclass(frozen=True)
class Seen:
    """An answer to a question. `is_as_assumed`: whether it agrees with the worker's assumption."""

    text: str
    is_as_assumed: bool = True


class Bench:
    """One engine, and requests to it. `patience_s`: how long a question may take."""

    def __init__(self, model: str, tensor_parallel_size: int, patience_s: float) -> None:
        package = importlib.import_module("tensorrt_llm")
        self.model = model
        self.version: str = importlib.import_module("tensorrt_llm.version").__version__
        self._params = package.SamplingParams
        self.guided_params = importlib.import_module("tensorrt_llm.llmapi").GuidedDecodingParams
        self.patience_s = patience_s
        self.abort_s = min(ABORT_S, patience_s / 4)
        self.llm = package.LLM(
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            max_batch_size=BATCH_SIZE,
            max_num_tokens=CONTEXT_LENGTH,
            max_seq_len=CONTEXT_LENGTH,
            enable_chunked_prefill=True,
            kv_cache_config={"free_gpu_memory_fraction": 0.5, "enable_block_reuse": True},
            enable_iter_perf_stats=True,
            guided_decoding_backend="xgrammar",
        )
        self.prompt = list(self.llm.tokenizer.encode(TEXT))[: CONTEXT_LENGTH - LONG - 1]
        self.end_id: int = self.llm.tokenizer.eos_token_id

    def start(self, prompt: Sequence[int] | None = None, **fields: Any) -> Any:
        """Start a streaming request: greedy and ended only by `max_tokens`, unless `fields` change that."""
        given = {"end_id": self.end_id, "ignore_eos": True, "max_tokens": ANSWER, "detokenize": False} | fields
        if "temperature" not in given:
            given["top_k"] = 1
        return self.llm.generate_async(
            inputs=list(prompt or self.prompt), sampling_params=self._params(**given), streaming=True
        )

    async def answer(self, prompt: Sequence[int] | None = None, **fields: Any) -> Any:
        """Run a request to its end. Returns its completion."""
        result = self.start(prompt, **fields)
        await drain(result)
        return result.outputs[0]

    async def tokens(self, prompt: Sequence[int] | None = None, **fields: Any) -> list[int]:
        return list((await self.answer(prompt, **fields)).token_ids)

    async def early_token(self) -> tuple[int, list[int]]:
        """A token that occurs early in the model's answer for the first time, and the tokens before it."""
        free = (await self.tokens())[: ANSWER // 2]
        index = max(index for index, token in enumerate(free) if token not in free[:index])
        return free[index], free[:index]


async def drain(result: Any) -> None:
    """Read the result to its end. It may have none, so callers must bound the wait."""
    async for _ in result:
        pass


async def begun(result: Any, count: int) -> int:
    """Read `count` items. Returns the number of tokens after them."""
    for _ in range(count):
        await result.__anext__()
    return len(result.outputs[0].token_ids)


async def aborted(result: Any, limit_s: float) -> str:
    """Abort the request. Returns a description of what follows."""
    count, began = len(result.outputs[0].token_ids), time.monotonic()
    result.abort()
    try:
        async with asyncio.timeout(limit_s):
            await drain(result)
    except TimeoutError:
        return f"no final item in {limit_s:g} s"
    output, took_ms = result.outputs[0], (time.monotonic() - began) * 1000
    return f"final item after {took_ms:.0f} ms and {len(output.token_ids) - count} tokens, {output.finish_reason!r}"


def same(are_same: bool) -> str:
    return "the same" if are_same else "different"


# Questions


async def stats_before_requests(bench: Bench) -> Seen:
    count = 0
    async for _ in bench.llm.get_stats_async(timeout=0.5):
        count += 1
    return Seen(f"{count} samples")


async def end_id_among_tokens(bench: Bench) -> Seen:
    end, before = await bench.early_token()
    output = await bench.answer(end_id=end, ignore_eos=False)
    token_ids = list(output.token_ids)
    place = {0: "cut off", 1: "the last of token_ids"}.get(len(token_ids) - len(before), f"{token_ids} after {before}")
    is_right = output.finish_reason == "stop" and token_ids[: len(before)] == before
    return Seen(f"{place}, {output.finish_reason!r}", is_right and len(token_ids) <= len(before) + 1)


async def stop_ids_with_ignore_eos(bench: Bench) -> Seen:
    stop, before = await bench.early_token()
    output = await bench.answer(stop_token_ids=[stop])
    token_ids = list(output.token_ids)
    if len(token_ids) > len(before) + 1:
        return Seen(f"ignored, {output.finish_reason!r}", token_ids[: len(before)] == before)
    kept = "kept" if len(token_ids) > len(before) else "cut off"
    return Seen(f"ends there, {output.finish_reason!r}, {kept}", token_ids[: len(before)] == before)


async def stop_string_with_end_id(bench: Bench) -> Seen:
    try:
        output = await bench.answer(stop="a")
    except Exception as error:
        return Seen(f"{type(error).__name__}: {error}")
    return Seen(f"taken, {output.finish_reason!r} after {len(output.token_ids)} tokens")


async def abort_of_a_running_request(bench: Bench) -> Seen:
    result = bench.start(max_tokens=LONG)
    await begun(result, 4)
    return Seen(await aborted(result, bench.abort_s))


async def abort_of_a_waiting_request(bench: Bench) -> Seen:
    running = [bench.start(max_tokens=LONG) for _ in range(BATCH_SIZE)]
    for one in running:
        await begun(one, 1)
    waiting = bench.start()
    await asyncio.sleep(0.1)  # Otherwise the abort might arrive before the request.
    seen = await aborted(waiting, bench.abort_s)
    for one in running:
        await aborted(one, bench.abort_s)
    return Seen(seen)


async def next_after_aborts(bench: Bench) -> Seen:
    count = len(await bench.tokens())
    return Seen(f"{count} of {ANSWER} tokens", count == ANSWER)


async def continuation(bench: Bench) -> Seen:
    whole, cuts = await bench.tokens(), (1, 7, 16, 31)
    rests = [await bench.tokens([*bench.prompt, *whole[:cut]], max_tokens=ANSWER - cut) for cut in cuts]
    equal = sum(rest == whole[cut:] for rest, cut in zip(rests, cuts, strict=True))
    return Seen(f"{equal} of {len(cuts)} continue with the same tokens", equal == len(cuts))


async def seed(bench: Bench) -> Seen:
    asks: list[dict[str, Any]] = [{"seed": 7}, {"seed": 7}, {}, {}]
    drawn = [await bench.tokens(temperature=1.5, top_p=1.0, top_k=0, **ask) for ask in asks]
    with_seed, without = drawn[0] == drawn[1], drawn[2] == drawn[3]
    return Seen(f"twice with a seed: {same(with_seed)}; without: {same(without)}", not with_seed)


async def penalties(bench: Bench) -> Seen:
    plain = await bench.tokens()
    penalised = await bench.tokens(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    return Seen(f"{same(plain == penalised)} tokens", plain == penalised)


async def min_p(bench: Bench) -> Seen:
    greedy = await bench.tokens()
    drawn = await bench.tokens(temperature=1.5, top_p=1.0, top_k=0, min_p=1.0)  # Keeps only the likeliest token.
    return Seen(f"{same(drawn == greedy)} tokens as greedy ones", drawn != greedy)


async def min_tokens(bench: Bench) -> Seen:
    """The prompt is longer than `min_tokens`: an engine that counted it would end the answer early."""
    end, before = await bench.early_token()
    wanted = len(before) + 4
    count = len(await bench.tokens(end_id=end, ignore_eos=False, min_tokens=wanted))
    return Seen(f"{count} tokens of at least {wanted}", count >= wanted)


async def bias(bench: Bench) -> Seen:
    config = json.loads((Path(bench.model) / "config.json").read_text())
    size = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    torch = importlib.import_module("torch")
    token = (await bench.tokens())[-1]
    vector = torch.tensor([100.0 if one == token else 0.0 for one in range(size)], dtype=torch.float32)
    token_ids = await bench.tokens(embedding_bias=vector)
    return Seen(f"{token_ids.count(token)} of {ANSWER} are the token", token_ids == [token] * ANSWER)


async def logprobs(bench: Bench) -> Seen:
    """Log probabilities of the first token, whose scores do not depend on how it is drawn."""
    asks: list[dict[str, Any]] = [{}, {"temperature": 1.5, "top_p": 1.0, "top_k": 0}]
    firsts = [(await bench.answer(logprobs=2, **ask)).logprobs[0] for ask in asks]
    if not all(isinstance(one, dict) for one in firsts):
        return Seen(f"bare numbers: {firsts}", is_as_assumed=False)
    greedy, drawn = (max(one.logprob for one in first.values()) for first in firsts)
    return Seen(f"greedy {greedy:.3f}, drawn {drawn:.3f}, of {len(firsts[0])} tokens", abs(greedy - drawn) < 0.05)


async def guided_with_reuse_and_aborts(bench: Bench) -> Seen:
    def guided() -> Any:
        return bench.start(guided_decoding=bench.guided_params(json_object=True), detokenize=True, ignore_eos=False)

    for _ in range(3):
        result = guided()
        await begun(result, 2)
        await aborted(result, bench.abort_s)
    result = guided()
    await drain(result)
    text = result.outputs[0].text.strip()
    return Seen(f"answers, {result.cached_tokens} tokens from the cache: {text[:12]!r}", text.startswith("{"))


async def check_health(bench: Bench) -> Seen:
    return Seen("there" if hasattr(bench.llm, "_check_health") else "not there")


async def trace_headers(bench: Bench) -> Seen:
    names = inspect.signature(bench.llm.generate_async).parameters
    return Seen("taken" if "trace_headers" in names else "not taken")


async def import_without_gpu(bench: Bench) -> Seen:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import tensorrt_llm", stdout=pipe, stderr=pipe, env=hidden
    )
    _, stderr = await process.communicate()
    last = (stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    return Seen("works" if process.returncode == 0 else f"status {process.returncode}: {last}")


async def size(bench: Bench) -> Seen:
    del bench
    return Seen(f"{size_of('tensorrt_llm') / 1e9:.2f} GB")


async def kill_of_a_child(bench: Bench) -> Seen:
    children = descendants(os.getpid())
    if not children:
        return Seen("there is no child to kill")
    os.kill(max(children, key=resident_pages), signal.SIGKILL)
    began = time.monotonic()
    try:
        async with asyncio.timeout(bench.patience_s / 2):
            await bench.answer()
    except TimeoutError:
        return Seen(f"nothing in {bench.patience_s / 2:g} s")
    except Exception as error:
        return Seen(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}")
    return Seen("the engine still answers", is_as_assumed=False)


async def shutdown(bench: Bench) -> Seen:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def work() -> None:
        try:
            bench.llm.shutdown()
        finally:
            loop.call_soon_threadsafe(ended.set)

    began = time.monotonic()
    threading.Thread(target=work, daemon=True).start()
    try:
        async with asyncio.timeout(bench.patience_s / 2):
            await ended.wait()
    except TimeoutError:
        return Seen(f"not back in {bench.patience_s / 2:g} s")
    return Seen(f"back after {time.monotonic() - began:.1f} s")


Ask = Callable[[Bench], Awaitable[Seen]]
QUESTIONS: Sequence[tuple[str, Ask, str]] = (
    # The first question needs an engine without requests before it; the last two end the engine.
    ("statistics before the first request?", stats_before_requests, "none, and no error"),
    ("is the end id among token_ids?", end_id_among_tokens, "maybe, as the last; nothing after it"),
    ("ignore_eos with stop_token_ids?", stop_ids_with_ignore_eos, "either: the worker checks for them itself"),
    ("end_id with a stop string?", stop_string_with_end_id, "an error: the worker never sends strings"),
    (
        "abort of a running request?",
        abort_of_a_running_request,
        f"a final item within {ABORT_S:g} s; otherwise given up",
    ),
    ("abort of a waiting request?", abort_of_a_waiting_request, "possibly no final item: given up"),
    ("is the next request answered after aborts?", next_after_aborts, "yes, all of it"),
    ("a greedy answer, continued from a cut?", continuation, "the same tokens: the model card promises it"),
    ("does a seed have an effect?", seed, "none: sampled requests with a seed are refused"),
    ("do penalties have an effect?", penalties, "none: they are refused"),
    ("does min_p have an effect?", min_p, "none: it is refused"),
    ("does min_tokens count the answer alone?", min_tokens, "yes; otherwise such requests fail and do not end early"),
    ("does a bias have an effect?", bias, "yes: logit_bias is passed on"),
    ("log probabilities of the first token?", logprobs, "by token, before temperature and top_k"),
    ("xgrammar with block reuse and aborts?", guided_with_reuse_and_aborts, "the engine lives, and the answer is JSON"),
    ("_check_health?", check_health, "either: a canary is asked instead"),
    ("trace_headers?", trace_headers, "either: never passed"),
    ("import without a GPU?", import_without_gpu, "either: imported once the engine starts"),
    ("size of the package?", size, "too large for an extra"),
    ("kill -9 of the largest child?", kill_of_a_child, "an error or silence: the canary detects it"),
    ("does shutdown return?", shutdown, "possibly never: given up after a limit"),
)


def size_of(package: str) -> int:
    """The size of all files of a package, in bytes."""
    folders = importlib.import_module(package).__path__
    files = (file for folder in folders for file in Path(folder).rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)


def descendants(pid: int) -> list[int]:
    """The ids of all living descendants of a process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # The process has ended meanwhile.
    found, pending = list[int](), [pid]
    while pending:
        current = pending.pop()
        children = [child for child, parent in parents.items() if parent == current]
        found += children
        pending += children
    return found


def resident_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


async def answer_of(ask: Ask, bench: Bench) -> Seen:
    """Ask a question. A timeout and an unexpected error count as answers that contradict the assumption."""
    try:
        async with asyncio.timeout(bench.patience_s):
            return await ask(bench)
    except TimeoutError:
        return Seen(f"no answer in {bench.patience_s:g} s", is_as_assumed=False)
    except Exception as error:
        return Seen(f"{type(error).__name__}: {error}", is_as_assumed=False)


def exit_stuck(question: str) -> None:
    row(question, "blocks the event loop", "calls return", is_as_assumed=False)
    os._exit(1)


def row(*cells: str, is_as_assumed: bool) -> None:
    texts = [" ".join(cell.replace("|", "\\|").split()) for cell in cells]
    print(f"| {' | '.join(texts)} | {'yes' if is_as_assumed else '**no**'} |", flush=True)


async def ask_all(bench: Bench) -> bool:
    """Print a row for each question. Returns whether all assumptions hold."""
    print(f"\nTensorRT-LLM {bench.version}\n\n| question | seen | assumed | as assumed |\n| --- | --- | --- | --- |")
    is_well = True
    for question, ask, assumed in QUESTIONS:
        # A call into a dead engine may never return and block the loop.
        guard = threading.Timer(3 * bench.patience_s, exit_stuck, [question])
        guard.start()
        seen = await answer_of(ask, bench)
        guard.cancel()
        row(question, seen.text, assumed, is_as_assumed=seen.is_as_assumed)
        is_well = is_well and seen.is_as_assumed
    return is_well


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask TensorRT-LLM questions that only a GPU can answer.")
    parser.add_argument("--model", required=True, help="a model folder in Hugging Face's layout")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a question may take")
    given = parser.parse_args()
    bench = Bench(given.model, given.tensor_parallel_size, given.patience)
    is_well = asyncio.run(ask_all(bench))
    sys.stdout.flush()
    os._exit(0 if is_well else 1)  # The engine's exit handlers may never return.


if __name__ == "__main__":  # The engine's processes import this file, too.
    main()
