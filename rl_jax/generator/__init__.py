"""The generator: an inference engine that makes completions.

`engine.Engine` holds the device programs and the KV pages, with JetStream's
verbs (prefill, insert, generate, free, load_params); `scheduler.Scheduler`
decides on the host what runs when. Both know tokens only: no text, no reward.
"""
