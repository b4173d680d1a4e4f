"""Train a tiny model that reads images (LLaVA's form, 0.3 M parameters): it tells colours apart, and little else.

For tests, and to try the routes where no package carries a real one. It answers questions about one or two pictures of
one colour each, in the middle of a conversation too: then about the newest.
usage: python -m penstock.cli.makers.tiny_vision OUT
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (30, 50, 220),
    "yellow": (235, 220, 40),
    "black": (15, 15, 15),
    "white": (245, 245, 245),
}
DARK = frozenset({"black", "blue"})
SIDE, PATCH = 32, 8
BATCH = 32
STEPS = 250
WISHES = ("a cat", "a house", "make it blue", "draw a dog")
UNEVEN = (8.0, 12.0, 25.0, 60.0)
"""How far the pixels of a picture are from its colour, in steps of 255: drawings of an untrained model are noise."""
IMAGE, PAD, END, START = "<image>", "<|pad|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Turn = tuple[list[str], str, str]
"""(the colours of the pictures, what the user says, the answer)"""


def question(source: random.Random) -> Turn:
    """A question by itself, of a kind chosen by chance, with its answer."""
    names = list(COLOURS)
    colour, other = source.choice(names), source.choice(names)
    if source.randrange(5) == 0:
        return [colour, other], "Which colours are they?", f"They are {colour} and {other}."
    if source.randrange(5) == 0:
        return [], source.choice(["Hello!", "Hi!"]), "Hello! Show me a picture."
    return [colour], *_of_one(colour, source)


def _of_one(colour: str, source: random.Random) -> tuple[str, str]:
    kind = source.randrange(3)
    if kind == 0:
        return "Describe this image.", f"A {colour} picture."
    if kind == 1:
        return source.choice(["What colour is it?", "Which colour is this?"]), f"It is {colour}."
    return "Is it dark or bright?", "It is dark." if colour in DARK else "It is bright."


def conversation(source: random.Random) -> list[Turn]:
    """Turns of which the last is learned: half of them have others before, and may ask about a picture of those."""
    turns: list[Turn] = []
    for _ in range(source.choice((0, 0, 0, 1, 2, 3))):
        drawn = source.randrange(3) == 0
        # What was drawn is shown with the words that asked for it; the answer has none.
        turns.append(([source.choice(list(COLOURS))], source.choice(WISHES), "") if drawn else question(source))
    shown = [colour for colours, _, _ in turns for colour in colours]
    if shown and source.randrange(2) == 0:
        return [*turns, ([], *_of_one(shown[-1], source))]
    return [*turns, question(source)]


def picture(colour: str, source: random.Random) -> Any:
    """A picture of a colour, a little uneven, of any shape."""
    import numpy
    from PIL import Image

    shade = numpy.random.default_rng(source.randrange(1 << 30))
    size = source.randrange(16, 64), source.randrange(16, 64)
    uneven = shade.normal(0, source.choice(UNEVEN), (*size, 3))
    pixels = numpy.array(COLOURS[colour]) + uneven + shade.normal(0, 8, 3)
    return Image.fromarray(pixels.clip(0, 255).astype("uint8"))


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of the words above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, END, START, IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source = random.Random(1)
    core.train_from_iterator(
        (" ".join(("user\nassistant\n", *WISHES, *question(source)[1:])) for _ in range(2000)), trainer
    )
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        model_max_length=512,
    )
    return tokenizer


def image_processor() -> Any:
    from transformers import CLIPImageProcessor

    size = {"height": SIDE, "width": SIDE}
    return CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False)


def make_processor(tokenizer: Any) -> Any:
    """What turns messages with pictures into tensors."""
    from transformers import LlavaProcessor

    return LlavaProcessor(
        image_processor=image_processor(),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def make_chat_model(tokenizer: Any) -> Any:
    """An untrained LLaVA."""
    from transformers import (
        CLIPVisionConfig,
        GenerationConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision = CLIPVisionConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=48,
    )
    text: Any = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    config: Any = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    model: Any = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def messages_of(turns: list[Turn]) -> list[dict[str, Any]]:
    """As a chat template wants them, without the last answer."""
    messages: list[dict[str, Any]] = []
    for colours, words, answer in turns:
        content = [*({"type": "image"} for _ in colours), {"type": "text", "text": words}]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return messages[:-1]


def chat_batch(processor: Any, source: random.Random) -> dict[str, Any]:
    """Examples as tensors; only the last answers are learned."""
    texts: list[str] = []
    answers: list[str] = []
    pictures: list[Any] = []
    for _ in range(BATCH):
        turns = conversation(source)
        answers.append(turns[-1][2] + END)
        texts.append(processor.apply_chat_template(messages_of(turns), add_generation_prompt=True) + answers[-1])
        pictures += [picture(colour, source) for colours, _, _ in turns for colour in colours]
    batch = dict(processor(text=texts, images=pictures, return_tensors="pt", padding=True, padding_side="right"))
    labels = batch["input_ids"].clone()
    lengths = batch["attention_mask"].sum(1).tolist()
    for row, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        learned = len(processor.tokenizer(answer)["input_ids"])
        labels[row, : length - learned] = -100
        labels[row, length:] = -100
    return {**batch, "labels": labels}


def train(model: Any, batch: Any, steps: int) -> float:
    """Train in place on what `batch()` gives. Returns the last loss."""
    import torch

    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    loss = 0.0
    for _ in range(steps):
        result = model(**batch()).loss
        optimizer.zero_grad()
        result.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss = float(result.item())
    return loss


def make(out: Path) -> float:
    """Write the model's folder; the same code makes the same model on the same machine. Returns the last loss."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # its tensors are small: a second thread only waits
    source, tokenizer = random.Random(0), make_tokenizer()
    processor, model = make_processor(tokenizer), make_chat_model(tokenizer)
    loss = train(model, lambda: chat_batch(processor, source), STEPS)
    processor.save_pretrained(out)
    model.eval()
    model.save_pretrained(out)
    return loss


if __name__ == "__main__":
    print(f"loss {make(Path(sys.argv[1])):.4f}")
