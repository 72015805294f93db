r"""Text: from a name or a path to batches of token numbers.

```python
corpus = load_corpus("tiny-shakespeare")
tokenizer = build_tokenizer("characters", corpus)
training, validation = split(encode_corpus(corpus, tokenizer), seq_len=256)
batches = Batches(training, seq_len=256, batch=32, seed=1)
inputs, targets = batches[0]
```

The pages, in the order in which a text passes through them: `reading`, `downloads`, `corpora`, `tokenizer`,
`characters`, `words`, `byte_pairs`, `tokenizers`, `token_files`, `windows`; `storage` keeps what they write.
"""

from postil.text.corpora import CORPORA, Corpus, default_corpus, load_corpus, read_text
from postil.text.reading import TextError, clean_text
from postil.text.storage import cache_folder
from postil.text.token_files import (
    Tokens,
    count_tokens,
    encode_corpus,
    measure,
    open_tokens,
    split,
    unseen_symbols,
    write_tokens,
)
from postil.text.tokenizer import TextStream, Tokenizer, Units, fingerprint
from postil.text.tokenizers import TOKENIZERS, build_tokenizer, tokenizer_from_dict
from postil.text.windows import (
    Batches,
    batch,
    fixed_windows,
    sequential_windows,
    shuffled_windows,
    window_count,
)

__all__ = [
    "CORPORA",
    "TOKENIZERS",
    "Batches",
    "Corpus",
    "TextError",
    "TextStream",
    "Tokenizer",
    "Tokens",
    "Units",
    "batch",
    "build_tokenizer",
    "cache_folder",
    "clean_text",
    "count_tokens",
    "default_corpus",
    "encode_corpus",
    "fingerprint",
    "fixed_windows",
    "load_corpus",
    "measure",
    "open_tokens",
    "read_text",
    "sequential_windows",
    "shuffled_windows",
    "split",
    "tokenizer_from_dict",
    "unseen_symbols",
    "window_count",
    "write_tokens",
]
