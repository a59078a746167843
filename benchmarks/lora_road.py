"""The LoRA road in one command: text checkpoints, target, draft, bundle, REST, and reasons.

    OMP_NUM_THREADS=1 python benchmarks/lora_road.py

For checkpoints with one matrix for embedding and head (tied), and with two, the script makes a
synthetic shop, trains a BPE tokenizer on its titles, and writes two LLaMA checkpoints of random
weights with it: a base for the target and a smaller one for the draft. Then it gives the commands
of a user: `recsys train target --base`, `recsys train draft --base`, `recsys bundle`,
`recsys serve` and `recsys explain`. Target and draft are trained with LoRA, and their adapters stay
separate.

The reference reads the bundle's target with transformers and its adapter with peft. It writes the
prompt as text, the instruction and the names of the codes (`<a_3>`), and lets the tokenizer of the
bundle encode it. The list is that of `generate` with 20 beams, as the service has, and the codes of
all items that are not in the user's history. A list of the service differs if its items, in their
order, are not those of the reference, or if a score is further away than 1e-4. Items whose scores
are within 1e-5 of each other may change places.

Reasons are compared with those that the same grammar writes over the weights that peft merges.

Every command runs in a copy of this process, which has imported the libraries already. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import peft
import pyarrow.parquet as pq
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recsys import cli
from recsys.benchmark.environment import environment
from recsys.text.explain import Explainer

NAME, K, BEAMS, WINDOW, EXPLAINED = "road", 10, 20, 8, 2
INSTRUCTION = "the customer has bought:"
TOLERANCE, TIE = 1e-4, 1e-5
NOWHERE = Path(os.devnull)
# What the commands import; their copies of this process then have it.
SHARED = ("training.target", "training.draft", "training.bundle", "serving.server", "recommender")
COPIES = multiprocessing.get_context("fork")
CONFIG = f"""
name: {NAME}
ids: {{method: rq-kmeans, levels: 3, codebook_size: 16}}
target:
  instruction: "{INSTRUCTION}"
  prompt: {{max_items: {WINDOW}, block: 1}}
  lora: {{rank: 4, merge: false}}
  epochs: 1
  learning_rate: 1.0e-2
  batch_tokens: 2000
  evaluate_every: 0
  eval_users: 20
  precision: float32
  threads: 1
teacher: {{beams: {BEAMS}, histories: 60, threads: 1}}
draft:
  objective: margin-kd
  lora: {{rank: 4, merge: false}}
  epochs: 1
  learning_rate: 1.0e-2
  batch_tokens: 2000
  evaluate_every: 0
  accept_users: 0
  precision: float32
  threads: 1
serve: {{threads: 1, deadline_ms: 3600000}}
"""
Ranking = list[tuple[str, float]]


def command(out: Path, words: Sequence[object]) -> None:
    """What a copy of this process does: one `recsys` command, which prints into a file."""
    torch.set_num_threads(1)
    sys.stdout = out.open("w", encoding="utf-8")
    sys.argv = ["recsys", *map(str, words)]
    cli.main()


def recsys(*words: object, out: Path = NOWHERE) -> None:
    """Give a command, and wait for its end; `out` gets what it prints."""
    process = COPIES.Process(target=command, args=(out, words))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"recsys {' '.join(map(str, words))} ended with {process.exitcode}")


@contextlib.contextmanager
def serve(*words: object) -> Iterator[httpx.Client]:
    """A client of `recsys serve` on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = COPIES.Process(target=command, args=(NOWHERE, ("serve", "--port", port, *words)))
    process.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=3600) as client:
            while not is_ready(client):
                if not process.is_alive():
                    raise SystemExit("recsys serve has ended")
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.join()


def is_ready(client: httpx.Client) -> bool:
    """Whether the service answers."""
    try:
        return client.get("/health/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def write_checkpoint(folder: Path, texts: list[str], tied: bool, hidden: int, layers: int) -> None:
    """A LLaMA of random weights, with a byte-level BPE tokenizer of these texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


class Reference:
    """The target of a bundle by transformers and peft, and nothing of this project."""

    def __init__(self, bundle: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(bundle / "target")
        base = transformers.AutoModelForCausalLM.from_pretrained(bundle / "target")
        self.model = peft.PeftModel.from_pretrained(base, bundle / "target" / "adapter").eval()
        items = pq.read_table(bundle / "catalog" / "items.parquet")
        self.names = {
            item: "".join(f"<{letter}_{code}>" for letter, code in zip("abc", codes, strict=True))
            for item, codes in zip(
                items["item_id"].to_pylist(), items["semantic_id"].to_pylist(), strict=True
            )
        }
        self.tokens = {item: tuple(self.encode(name)) for item, name in self.names.items()}
        if len(set(self.tokens.values())) < len(self.tokens):
            raise SystemExit("two items share their codes: the reference cannot tell them apart")

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def recommend(self, history: list[str]) -> Ranking:
        """The K best items that are not in the history, with their log-probabilities."""
        text = self.tokenizer.bos_token + INSTRUCTION
        prompt = self.encode(text + "".join(self.names[item] for item in history[-WINDOW:]))
        item_of = {row: item for item, row in self.tokens.items() if item not in set(history)}
        follow: dict[tuple[int, ...], set[int]] = {}
        for row in item_of:
            for level, token in enumerate(row):
                follow.setdefault(row[:level], set()).add(token)

        def allow(_: int, ids: torch.Tensor) -> list[int]:
            return list(follow.get(tuple(ids[len(prompt) :].tolist()), {0}))  # 0: a padding beam

        with torch.inference_mode():
            found = self.model.generate(
                input_ids=torch.tensor([prompt]),
                # all of them: the first one has the number that pads
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=BEAMS,
                num_return_sequences=BEAMS,
                max_new_tokens=3,
                length_penalty=0.0,
                do_sample=False,
                pad_token_id=0,
                prefix_allowed_tokens_fn=allow,
                return_dict_in_generate=True,
                output_scores=True,
            )
        rows = [tuple(row) for row in found.sequences[:, len(prompt) :].tolist()]
        scores = found.sequences_scores.tolist()
        ranked = zip(rows, scores, strict=True)
        return [(item_of[row], score) for row, score in ranked if row in item_of][:K]


def differs(mine: Ranking, theirs: Ranking) -> bool:
    """Whether two lists differ, as the head of this file says."""
    if len(mine) != len(theirs):
        return True
    for (item, score), (other, expected) in zip(mine, theirs, strict=True):
        if abs(score - expected) > TOLERANCE:
            return True
        near = dict(theirs).get(item, theirs[-1][1])
        if item != other and abs(near - expected) > TIE:
            return True
    return False


def walk(folder: Path, config: Path, tied: bool, users: int) -> dict[str, Any]:
    """One walk of the road; its figures."""
    data = folder / "var" / "datasets" / NAME
    titles = pq.read_table(data / "items.parquet")["title"].to_pylist()
    kind = "tied" if tied else "untied"
    for name, hidden, layers in (("large", 64, 2), ("small", 32, 1)):
        texts = [INSTRUCTION, *titles]
        write_checkpoint(folder / kind / name, texts, tied, hidden, layers)
    options = ("--config", config)
    recsys("train", "target", "--base", folder / kind / "large", *options)
    recsys("train", "draft", "--base", folder / kind / "small", *options)
    recsys("bundle", *options)
    bundle = folder / "var" / "bundles" / NAME
    said = folder / f"{kind}.json"
    events = pq.read_table(data / "interactions.parquet").to_pydict()
    user_ids = pq.read_table(data / "users.parquet")["user_id"].to_pylist()
    item_ids = pq.read_table(data / "items.parquet")["item_id"].to_pylist()
    histories: dict[str, list[str]] = {}
    for user, item in zip(events["user"], events["item"], strict=True):
        histories.setdefault(user_ids[user], []).append(item_ids[item])
    asked = list(histories)[:users]

    answers: dict[str, list[Ranking]] = {}
    own = (f"serve.store={folder / kind}.db", f"serve.explainer={bundle / 'target'}")
    settings = [word for setting in own for word in ("--set", setting)]
    with serve("--bundle", bundle, "--histories", data, *options, *settings) as client:
        for mode in ("beam", "strict"):
            answers[mode] = []
            for user in asked:
                body = {"user": user, "k": K, "mode": mode}
                response = client.post("/v1/recommendations", json=body)
                response.raise_for_status()
                found = response.json()
                answers[mode].append([(item["item_id"], item["score"]) for item in found["items"]])
        best = [item for item, _ in answers["beam"][0][:EXPLAINED]]
        response = client.post("/v1/explanations", json={"user": asked[0], "items": best})
        response.raise_for_status()
        served = response.json()["explanations"]
    words = ("--name", NAME, "--user", asked[0], "-k", EXPLAINED, "--json")
    recsys("explain", *words, out=said)
    printed = json.loads(said.read_text(encoding="utf-8"))["explanations"]

    reference = Reference(bundle)
    differing = dict.fromkeys(answers, 0)
    largest = 0.0
    for place, user in enumerate(asked):
        theirs = reference.recommend(histories[user])
        for mode, lists in answers.items():
            differing[mode] += differs(lists[place], theirs)
            scores = dict(theirs)
            gaps = [abs(score - scores[item]) for item, score in lists[place] if item in scores]
            largest = max(largest, *gaps)
    title_of = dict(zip(item_ids, titles, strict=True))
    writer = Explainer(reference.model.merge_and_unload(), reference.tokenizer)
    seen = list(dict.fromkeys(histories[asked[0]]))
    expected = [
        (one.explanation.because, one.explanation.reason)
        for one in writer.explain([title_of[i] for i in seen], [title_of[i] for i in best])
    ]
    reasons = {
        name: sum(
            ([part["title"] for part in row["because"]], row["reason"]) != wanted
            for row, wanted in zip(rows, expected, strict=True)
        )
        for name, rows in (("service", served), ("command", printed))
    }
    return {
        "kind": kind,
        "users": len(asked),
        "differing": differing,
        "largest_gap": largest,
        "explained": len(best),
        "reasons_differing": reasons,
        "adapters": [name for name in ("target", "draft") if (bundle / name / "adapter").is_dir()],
    }


def main() -> int:
    """Walk the road twice, print a table and one line of JSON; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=100, help="users whose lists are compared")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for module in SHARED:
        importlib.import_module(f"recsys.{module}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["RECSYS_HOME"] = str(folder / "var")
        config = folder / "road.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        recsys("data", "synth", "--users", 300, "--items", 240, "--name", NAME)
        recsys("ids", "train", "--config", config)
        rows = [walk(folder, config, tied, arguments.users) for tied in (True, False)]
    table = Table("embedding and head", "users", "beam search", "with the draft", "largest gap",
                  "reasons by REST", "reasons by the command")  # fmt: skip
    for row in rows:
        lists, reasons = row["differing"], row["reasons_differing"]
        of = row["explained"]
        table.add_row(
            row["kind"], str(row["users"]), str(lists["beam"]), str(lists["strict"]),
            f"{row['largest_gap']:.0e}", f"{reasons['service']} of {of}",
            f"{reasons['command']} of {of}",
        )  # fmt: skip
    console = Console(width=100)
    console.print(table)
    console.print(
        "Lists that differ from those of transformers with peft, the largest difference of a "
        "score, and reasons that differ from those over the weights that peft merges."
    )
    print(json.dumps({"benchmark": "lora_road", "rows": rows, "environment": environment()}))
    wrong = [n for r in rows for n in (*r["differing"].values(), *r["reasons_differing"].values())]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
