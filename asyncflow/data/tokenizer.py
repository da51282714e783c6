"""The tokenizer of a run: that of a model's folder, or one token for each character of an alphabet.

Both are Hugging Face tokenizers, so that a checkpoint holds them in the usual form. Nothing is downloaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.config.importing import missing
from asyncflow.config.model import Model
from asyncflow.config.vocabulary import SPECIALS, size
from asyncflow.errors import ConfigError, DataError, MissingDependency
from asyncflow.storage.batch import Batch
from asyncflow.types import Int64s

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer(model: Model) -> "PreTrainedTokenizerBase":
    """Make or load the tokenizer of a model; it always has a pad token."""
    if model.tokenizer == "characters":
        return characters(model.characters)
    folder = model.tokenizer or model.path
    if folder is None:
        raise ConfigError("model.tokenizer: a new model needs one: `characters`, or a folder")
    return _load(folder)


def characters(alphabet: str) -> "PreTrainedTokenizerBase":
    """Make a tokenizer of one token for each character, with the ids of `<pad>`, `<eos>` and `<unk>` before them.

    Decoding gives back every text over the alphabet exactly; the text `<eos>` is five characters, not the token.
    """
    _need_transformers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ConfigError("model.characters: expected each character of the alphabet once")
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, *alphabet))}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    return made


def answer_tokens(batch: Batch, tokenizer: "PreTrainedTokenizerBase") -> list[Int64s]:
    """Return the tokens of each row's `answer_text` and the end-of-sequence token: what supervised training aims at."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, which must end every answer")
    texts = batch["answer_text"].strings()
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [np.array([*tokens, tokenizer.eos_token_id], dtype=np.int64) for tokens in encoded]


def agree(policy: "PreTrainedTokenizerBase", folder: str) -> None:
    """Check that the model of a folder means the same by each token; a folder without a tokenizer is trusted in that.

    One may know more tokens than the other, but no token of the policy may be beyond the model's vocabulary.
    """
    known = size(folder)
    if known is not None and known < len(policy):
        raise ConfigError(f"{folder} knows {known} tokens, and the policy {len(policy)}: expected the same vocabulary")
    if not any(Path(folder).glob("tokenizer*")):
        return
    ours, theirs = policy.get_vocab(), _load(folder).get_vocab()
    named = {number: token for token, number in theirs.items()}
    for number, token in sorted((number, token) for token, number in ours.items()):
        other = theirs.get(token, number)
        if other != number or named.get(number, token) != token:
            raise ConfigError(
                f"{folder} has another vocabulary than the policy: token {number} is {token!r} for the policy, and "
                f"{named.get(number, 'none')!r} there"
            )


def _load(folder: str) -> "PreTrainedTokenizerBase":
    _need_transformers()
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ConfigError(f"model: {missing(Path(folder))}")
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(f"{folder} holds no usable tokenizer: {error}") from error
    if loaded.pad_token_id is None:
        if loaded.eos_token_id is None:
            raise ConfigError(f"the tokenizer in {folder} has neither a pad token nor an end-of-sequence token")
        loaded.pad_token = loaded.eos_token
    return loaded


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingDependency("transformers", "a tokenizer", "pip install 'asyncflow-rl[torch]'") from error
