"""An OpenAI-style HTTP server over one model, in two processes.

    app, guard, schemas, replies, sse, metrics, run     the HTTP process: no weights, no tokenizer, no torch, no numpy
    client  <-- messages: JSON frames on a socket -->  worker
    backend                                             the engine process: owns the `LLM`

The HTTP process must never wait for a kernel, and the engine must not share its interpreter lock with a hundred
connections. Between them goes one message per engine step. `backend.Backend` is all that the worker knows of the
engine behind it; text becomes tokens, and tokens text, in the engine process, so that the vocabulary is in memory once.

Promises: every request is answered once, by a result or by an error in OpenAI's envelope; a client that leaves stops
its work at the next layer; if either process dies, the other one says so or ends.
"""
