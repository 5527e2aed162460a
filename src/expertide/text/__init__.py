"""Text to token ids and back: tokenizer, chat templates, streaming decoder, stop strings.

    tokenizer.py        Tokenizer: encode, decode, bytes of a token, stop ids; made from a model's own files
    vocabulary.py       the vocabulary as GGUF metadata gives it, checked before anything is built from it
    pre_tokenizers.py   table of pre-tokenizers by their GGUF name
    special_tokens.py   which tokens are control tokens, and which of them end a generation
    hf_tokenizer.py     a `tokenizer.json` next to the model, used as written
    byte_alphabet.py    the printable stand-ins for bytes that byte-level vocabularies are written in
    detokenizer.py      IncrementalDetokenizer: token by token, never half a character
    stops.py            StopMatcher: stop strings over token borders
    sizes.py            memory that a tokenizer needs, for the plan
    chat.py             ChatTemplate: the model's jinja2 template in a sandbox

Promises: the pieces that a stream shows concatenate to what `decode` gives at once; whatever a file or a caller hands
in ends in success or in one of the errors of expertide.errors. Knows nothing of models, weights or torch.
"""
