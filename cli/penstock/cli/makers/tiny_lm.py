"""Train a tiny chat model (0.9 M parameters) on dialogues made in code: for tests and benchmarks, not for people.

It follows its chat format, ends its turns, tells a story of some eighty tokens and half remembers what it was told.
usage: python -m penstock.cli.makers.tiny_lm OUT
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS = 300
BLOCK = 96
BATCH = 16
VOCABULARY = 1024

NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jack Kim Leo Mia Noah Olga Paul Quinn Rosa Sam Tina".split()  # noqa: SIM905
COLORS = "red blue green yellow orange purple black white pink brown".split()  # noqa: SIM905
ANIMALS = "cat dog horse bird fish lion mouse cow sheep duck".split()  # noqa: SIM905
NUMBERS = (  # noqa: SIM905
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen"
).split()
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Canada": "Ottawa",
    "China": "Beijing",
    "Russia": "Moscow",
}
PAD, END, START = "<|pad|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Dialogues:
    """An endless, seeded source of short conversations."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def conversation(self) -> list[tuple[str, str]]:
        """One to four turns of (question, answer); an answer may need an earlier turn."""
        known: dict[str, str] = {}
        return [self._turn(known) for _ in range(self._random.randint(1, 4))]

    def text(self) -> str:
        """A conversation in the chat format."""
        return "".join(
            f"{START}user\n{question}{END}\n{START}assistant\n{answer}{END}\n"
            for question, answer in self.conversation()
        )

    def _turn(self, known: dict[str, str]) -> tuple[str, str]:
        kinds = (self._hello, self._name, self._ask_name, self._capital, self._capital, self._sum)
        kinds += (self._color, self._ask_color, self._repeat, self._thanks, self._count, self._story)
        return self._random.choice(kinds)(known)

    def _hello(self, known: dict[str, str]) -> tuple[str, str]:
        pick = self._random.choice
        answers = ["Hello! How can I help you today?", "Hi! What can I do for you?"]
        return pick(["Hello!", "Hi!", "Hello, how are you?", "Hi there!"]), pick(answers)

    def _name(self, known: dict[str, str]) -> tuple[str, str]:
        known["name"] = name = self._random.choice(NAMES)
        said = self._random.choice([f"My name is {name}.", f"I am {name}.", f"Call me {name}."])
        return said, f"Nice to meet you, {name}!"

    def _ask_name(self, known: dict[str, str]) -> tuple[str, str]:
        unknown = "You have not told me your name yet."
        return "What is my name?", f"Your name is {known['name']}." if "name" in known else unknown

    def _capital(self, known: dict[str, str]) -> tuple[str, str]:
        land, city = self._random.choice(list(CAPITALS.items()))
        ways = [f"What is the capital of {land}?", f"Capital of {land}?", f"Tell me the capital of {land}."]
        return self._random.choice(ways), f"The capital of {land} is {city}."

    def _sum(self, known: dict[str, str]) -> tuple[str, str]:
        a, b = self._random.randrange(10), self._random.randrange(10)
        ways = [f"What is {NUMBERS[a]} plus {NUMBERS[b]}?", f"Add {NUMBERS[a]} and {NUMBERS[b]}."]
        return self._random.choice(ways), f"{NUMBERS[a].capitalize()} plus {NUMBERS[b]} is {NUMBERS[a + b]}."

    def _color(self, known: dict[str, str]) -> tuple[str, str]:
        known["color"] = color = self._random.choice(COLORS)
        return f"My favourite color is {color}.", f"{color.capitalize()} is a lovely color."

    def _ask_color(self, known: dict[str, str]) -> tuple[str, str]:
        unknown = "You have not told me your favourite color yet."
        answer = f"Your favourite color is {known['color']}." if "color" in known else unknown
        return "What is my favourite color?", answer

    def _repeat(self, known: dict[str, str]) -> tuple[str, str]:
        pick = self._random.choice
        words = f"{pick(ANIMALS)} {pick(COLORS)} {pick(NAMES)}"
        return pick([f"Repeat after me: {words}", f"Say {words}"]), words

    def _thanks(self, known: dict[str, str]) -> tuple[str, str]:
        return self._random.choice(["Thank you!", "Thanks!"]), "You are welcome!"

    def _count(self, known: dict[str, str]) -> tuple[str, str]:
        last = self._random.randrange(3, 9)
        return f"Count to {NUMBERS[last]}.", ", ".join(NUMBERS[1 : last + 1]) + "."

    def _story(self, known: dict[str, str]) -> tuple[str, str]:
        pick = self._random.choice
        animal, color, name = pick(ANIMALS), pick(COLORS), pick(NAMES)
        land, city = pick(list(CAPITALS.items()))
        story = (
            f"Once upon a time there was a {color} {animal} named {name}. The {animal} lived near {city} in {land}."
            f" One day {name} met a {pick(COLORS)} {pick(ANIMALS)} and they became good friends. They walked together"
            " through the forest and talked about the stars until the night came. The end."
        )
        return f"Tell me a story about a {animal}.", story


def make_tokenizer(dialogues: Dialogues) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((dialogues.text().replace(START, "").replace(END, "") for _ in range(4000)), trainer)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Any) -> Any:
    """An untrained Llama of 0.9 M parameters."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config: Any = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model: Any = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def batches(tokenizer: Any, dialogues: Dialogues) -> Iterator[Any]:
    """Endless (BATCH, BLOCK) tensors of token ids cut from a stream of conversations."""
    import torch

    ids: list[int] = []
    while True:
        while len(ids) < BLOCK * BATCH:
            texts = [dialogues.text() for _ in range(64)]
            ids += [token for encoded in tokenizer(texts)["input_ids"] for token in encoded]
        yield torch.tensor(ids[: BLOCK * BATCH]).view(BATCH, BLOCK)
        ids = ids[BLOCK * BATCH :]


def train(model: Any, stream: Iterator[Any], steps: int) -> float:
    """Train in place with a short warm-up and a cosine decay. Returns the last loss."""
    import torch

    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.05)
    loss = math.inf
    for step in range(steps):
        rate = 5e-3 * min(1.0, (step + 1) / 30) * (0.475 * (1 + math.cos(math.pi * step / steps)) + 0.05)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = next(stream)
        result = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        result.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = float(result.item())
    return loss


def make(out: Path, steps: int = STEPS) -> float:
    """Write the model's folder; the same code makes the same model on the same machine. Returns the last loss."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(2)
    dialogues = Dialogues(seed=0)
    tokenizer = make_tokenizer(dialogues)
    model = make_model(tokenizer)
    loss = train(model, batches(tokenizer, dialogues), steps)
    model.eval()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return loss


if __name__ == "__main__":
    print(f"loss {make(Path(sys.argv[1])):.3f}")
