"""Trains a LoRA adapter with the Tinker SDK and saves it, so that a chat can use it.

    phaseloom up --model HuggingFaceTB/SmolLM2-135M-Instruct    # prints the two variables
    TINKER_BASE_URL=… TINKER_API_KEY=… python examples/tinker_adapter.py --model HuggingFaceTB/…

The adapter learns one answer. Replace QUESTION and ANSWER by data of your own. It needs
`pip install tinker transformers`.
"""

from __future__ import annotations

import argparse
from typing import Any

import tinker
from tinker import types

QUESTION = "What does Phaseloom do?"
ANSWER = "It lets several training jobs share the same devices."


def prompt_of(tokenizer: Any, question: str) -> list[int]:
    """Return the tokens of a chat with one question, up to the answer."""
    if tokenizer.chat_template is None:
        return [*tokenizer.encode(question)]
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return [*tokenizer.encode(text, add_special_tokens=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--model", required=True, help="name of the base model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=8)
    arguments = parser.parse_args()

    service = tinker.ServiceClient()  # TINKER_BASE_URL, TINKER_API_KEY
    client = service.create_lora_training_client(
        base_model=arguments.model, rank=arguments.rank
    ).result()
    tokenizer = client.get_tokenizer()
    prompt = prompt_of(tokenizer, QUESTION)
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False)]
    if tokenizer.eos_token_id is not None:
        answer.append(tokenizer.eos_token_id)
    tokens = prompt + answer
    inputs: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),
    }
    lesson = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    for step in range(arguments.steps):
        trained = client.forward_backward([lesson], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        loss = trained.result().metrics["loss:sum"] / len(answer)
        print(f"step {step}: loss {loss:.4f} a token", flush=True)

    saved = client.save_weights_for_sampler("adapter").result().path
    sampler = service.create_sampling_client(model_path=saved).result()
    greedy = types.SamplingParams(max_tokens=len(answer) + 8, temperature=0.0)
    drawn = sampler.sample(types.ModelInput.from_ints(prompt), 1, greedy).result()
    print(f"{QUESTION} {tokenizer.decode(drawn.sequences[0].tokens, skip_special_tokens=True)}")
    print(f"to chat with it, use this as the model: {saved}")


if __name__ == "__main__":
    main()
