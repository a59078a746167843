"""Workers that score the parts of a job. Each function yields (part, table) in any order."""

import contextlib
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import pyarrow as pa

from recsys.errors import RecsysError
from recsys.serving.batch.job import Job
from recsys.serving.cluster.ray import import_ray, start_ray


def in_this_process(job: Job, parts: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
    """Score in this process, one part after the other."""
    from recsys.serving.batch.scoring import Scorer

    scorer = Scorer(job)
    for part in parts:
        yield part, scorer.part(part)


def on_processes(job: Job, parts: Sequence[int], workers: int) -> Iterator[tuple[int, pa.Table]]:
    """Score in processes of this machine, which end with this one.

    Raises:
        RecsysError: a worker failed or died; the text names the part.
    """
    context = get_context("spawn")  # torch does not work in forked processes
    waiting = deque(parts)
    busy: dict[Connection, int] = {}
    processes = []
    try:
        for _ in range(min(workers, len(parts))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()  # so that each side notices the end of the other
            processes.append(process)
            _ask(ours, waiting, busy)
        while busy:
            for ready in [pipe for pipe in wait(list(busy)) if isinstance(pipe, Connection)]:
                part = busy.pop(ready)
                table = _hear(ready, part)
                _ask(ready, waiting, busy)
                yield part, table
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def on_ray(
    job: Job, parts: Sequence[int], workers: int, gpus: float = 0.0
) -> Iterator[tuple[int, pa.Table]]:
    """Score in actors of a Ray cluster: that of `RAY_ADDRESS`, or one on this machine.

    Bundle and users must be at the same paths on all machines. Each actor loads the bundle once
    and gets a share `gpus` of a GPU.
    """
    ray = import_ray("data")
    from ray.data import ActorPoolStrategy, DataContext

    ours = not ray.is_initialized()
    if ours:
        start_ray(ray)
    try:
        context = DataContext.get_current()
        context.enable_progress_bars = False  # the command shows its own
        context.print_on_execution_start = False
        numbers = [{"part": part} for part in parts]
        tables = ray.data.from_items(numbers, override_num_blocks=len(parts)).map_batches(
            _Actor,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ActorPoolStrategy(size=min(workers, len(parts))),
            num_cpus=1,
            num_gpus=gpus or None,
        )
        for row in tables.iter_rows():
            yield int(row["part"]), pa.ipc.open_stream(row["table"]).read_all()
    finally:
        if ours:
            ray.shutdown()


class _Actor:
    """A scorer for Ray Data, whose rows are whole parts."""

    def __init__(self, job: Job) -> None:
        from recsys.serving.batch.scoring import Scorer

        self._scorer = Scorer(job)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        parts = [int(part) for part in batch["part"]]
        return {"part": parts, "table": [_packed(self._scorer.part(part)) for part in parts]}


def _packed(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def _work(tasks: Connection, job: Job) -> None:
    """Receive parts and send tables, until the other side ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the main process
    try:
        from recsys.serving.batch.scoring import Scorer

        scorer = Scorer(job)
        while True:
            tasks.send(scorer.part(tasks.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except RecsysError as error:
        text = str(error)
    except Exception:
        text = traceback.format_exc()
    with contextlib.suppress(OSError):
        tasks.send(text)


def _ask(worker: Connection, waiting: deque[int], busy: dict[Connection, int]) -> None:
    if not waiting:
        worker.close()
        return
    part = waiting.popleft()
    with contextlib.suppress(BrokenPipeError):  # it died: the next read reports it
        worker.send(part)
    busy[worker] = part


def _hear(worker: Connection, part: int) -> pa.Table:
    try:
        found = worker.recv()
    except (EOFError, ConnectionResetError) as error:
        raise RecsysError(
            f"a worker died at part {part} (out of memory?); run the command again, with "
            "fewer --workers if need be"
        ) from error
    if isinstance(found, str):
        raise RecsysError(f"a worker failed at part {part}: {found}")
    return found
