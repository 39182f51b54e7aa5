"""Make the tiny base of the miniature world: `python minirouter/assets/tiny/make.py --seed 0 --out DIR`.

Like an instruct model it is to know the form and to read descriptors, but not whom to ask, nor when to ask
twice. First a dense look-up drill, then demonstrations. About four minutes on one core; the same bits each
time on the same machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minirouter import data, sft, tags, world
from minirouter.trajectory import Candidate, Question

SPECIALS = {"pad": "<|pad|>", "unk": "<|unk|>", "bos": "<|begin|>", "eos": "<|end|>"}
ROLES = ("<|user|>", "<|assistant|>")
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message.role + '|> ' + message.content + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
DRILL_SHARE, PRICELESS_SHARE, SLOPPY_SHARE = 0.12, 0.1, 0.03
Shown = tuple[Question, world.Segments]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, a tag, a sign; any white space between them, decoded as one space."""
    words = [*SPECIALS.values(), *ROLES]
    words += [f"<{slash}{tag}>" for tag in tags.TAGS for slash in ("", "/")]
    words += world.vocabulary()
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIALS["unk"]))
    pattern = Regex(r"</?[a-z]+>|\$?\w+|[^\w\s]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        additional_special_tokens=list(ROLES),
        **{f"{key}_token": token for key, token in SPECIALS.items()},
    )


def tiny_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers of random weights, but for one head each: together they find what followed a word before."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        attention_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    first, second = (layer.self_attn for layer in model.model.layers)
    look_back(first, theta=1000.0)
    match_and_copy(second, below=first)
    return model


@torch.no_grad()
def look_back(attention: torch.nn.Module, theta: float, frequencies: int = 5, strength: float = 3.5) -> None:
    """Make head 0 a previous-token head: constant key and query, one position apart by rotary angle."""
    half = attention.head_dim // 2
    angles = theta ** (-torch.arange(half) / half)  # radians a position
    on = torch.arange(half) < frequencies
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[: 2 * half] *= 0.1
    attention.k_proj.bias[:half] = torch.where(on, strength, 0.0)
    attention.q_proj.bias[:half] = torch.where(on, strength * torch.cos(angles), 0.0)
    attention.q_proj.bias[half : 2 * half] = torch.where(on, -strength * torch.sin(angles), 0.0)


@torch.no_grad()
def match_and_copy(attention: torch.nn.Module, below: torch.nn.Module, strength: float = 3.0) -> None:
    """Make head 0 look where head 0 of the layer below saw the present token, and copy what stands there.

    With `look_back` alone the drill may stall for a thousand steps: names are first guessed from what other
    heads spread, and then nothing in the second layer attends to them any more.
    """
    size = attention.head_dim
    # (E, E): token before -> what is written
    seen = below.o_proj.weight[:, :size] @ below.v_proj.weight[:size]
    scale = strength * len(seen) / seen.norm() ** 2
    attention.k_proj.weight[:size] = scale * attention.q_proj.weight[:size] @ seen.T
    attention.o_proj.weight[:, :size] = strength * attention.v_proj.weight[:size].T


def encode(tokenizer: PreTrainedTokenizerFast, shown: Shown, show_prices: bool) -> sft.Example:
    """One example, its prompt as the rollout would have it."""
    question, segments = shown
    template = data.load_template("tiny")
    text = data.render_prompt(template, question.text, question.pool.candidates, show_prices)
    return sft.encode_segments(tokenizer, data.encode_prompt(tokenizer, text), segments)


def look_up_drill(rng: random.Random, lines: int, names: Sequence[str], choose: bool = False) -> Shown:
    """A pool of distinct descriptors, then "ask DESCRIPTOR NAME" twice as often. The names are learnt and,
    with `choose`, the descriptors too, at random: to announce only what the pool has."""
    words = rng.sample(world.DESCRIPTORS, lines)
    drawn = zip(rng.sample(names, lines), words, strict=True)
    pool = world.SimulatedPool(tuple(Candidate(name, rng.randint(1, 9), word) for name, word in drawn))
    asked = [rng.choice(pool.candidates) for _ in range(2 * lines)]
    turns = [(("ask", False), (line.descriptor, choose), (line.name, True)) for line in asked]
    return Question("drill", "unknown", (), pool=pool), [segment for turn in turns for segment in turn]


def spoil(segments: world.Segments, rng: random.Random) -> world.Segments:
    """Malformed, so that the format reward has work to do: a turn loses a think tag, or stops after it."""
    i = rng.choice([i for i, (_, mine) in enumerate(segments) if mine])
    turn = segments[i][0]
    if rng.random() < 0.5:
        return [*segments[:i], (turn.partition(" </think>")[0] + " </think>", True)]
    tag = rng.choice(["<think> ", "</think> "])
    return [*segments[:i], (turn.replace(tag, ""), True), *segments[i + 1 :]]


def learn_to_look_up(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[float]:
    """The drill, harder and harder: names double when the loss falls under .25; it ends under .03."""
    stage = {"names": 48, "lines": 6}
    rng = random.Random(f"drill {seed}")

    def batches() -> Iterator[list[sft.Example]]:
        while True:
            names = world.NAMES[:: len(world.NAMES) // stage["names"]]
            drills = [look_up_drill(rng, stage["lines"], names) for _ in range(32)]
            yield [encode(tokenizer, drill, rng.random() > PRICELESS_SHARE) for drill in drills]

    smooth = 1.0
    steps = sft.supervised_steps(logits_of(model), model.parameters(), batches(), 2000, 2e-3, cosine=False)
    for loss in steps:
        smooth = 0.7 * smooth + 0.3 * loss
        yield loss
        if stage["names"] < len(world.NAMES) and smooth < 0.25:
            stage |= {"names": 2 * stage["names"], "lines": 7}
            smooth = 1.0
        elif smooth < 0.03:
            return


def learn_the_form(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int
) -> Iterator[float]:
    """Demonstrations, some of them sloppy, with drill rows among them."""
    rng = random.Random(f"form {seed}")
    shown = world.demonstrations(32 * steps, seed)

    def row() -> sft.Example:
        if rng.random() < DRILL_SHARE:
            example = look_up_drill(rng, rng.randint(3, 7), world.NAMES, choose=True)
        else:
            question, segments = next(shown)
            example = question, spoil(segments, rng) if rng.random() < SLOPPY_SHARE else segments
        return encode(tokenizer, example, rng.random() > PRICELESS_SHARE)

    batches = ([row() for _ in range(32)] for _ in range(steps))
    yield from sft.supervised_steps(logits_of(model), model.parameters(), batches, steps, 2.5e-3)


def logits_of(model: LlamaForCausalLM):
    return lambda ids, mask: model(input_ids=ids).logits  # right padding: causal attention never sees it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the order of sums, and with it every bit, depends on it
    tokenizer = word_tokenizer()
    model = tiny_llama(tokenizer).train()
    for phase, losses in (
        ("drill", learn_to_look_up(model, tokenizer, options.seed)),
        ("form", learn_the_form(model, tokenizer, options.seed, options.steps)),
    ):
        for step, loss in enumerate(losses):
            if step % 20 == 0:
                print(json.dumps({"phase": phase, "step": step, "loss": round(loss, 4)}), flush=True)
        print(json.dumps({"phase": phase, "step": step, "loss": round(loss, 4)}), flush=True)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
