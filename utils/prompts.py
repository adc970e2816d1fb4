"""Prompts: strings, or chats of messages that a tokenizer's template writes."""

from typing import Any

from utils.validation import require

Prompt = str | list[dict[str, str]]  # messages such as {"role": "user", "content": "Hi"}


def is_prompt(prompt: Any) -> bool:
    """Return whether this is a string, or a list of messages."""
    if isinstance(prompt, str):
        return True
    is_chat = isinstance(prompt, list) and len(prompt) > 0
    return is_chat and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    )


def write_prompt(prompt: Prompt, tokenizer: Any) -> str:
    """Return a prompt as the model reads it: messages with the template's own special tokens.

    A chat that ends with the assistant is a beginning of the answer, which the model goes on with.

    Raises ValueError for messages where the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return prompt
    require(
        tokenizer.chat_template is not None,
        f"prompts should be strings, as this tokenizer has no chat template, but one is {prompt!r}",
    )
    is_begun = prompt[-1]["role"] == "assistant"
    how = {"add_generation_prompt": not is_begun, "continue_final_message": is_begun}
    return tokenizer.apply_chat_template(prompt, tokenize=False, **how)


def show_prompt(prompt: Prompt) -> str:
    """Return what a table shows of a prompt: of messages, the last one."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
