"""Every key of a run, with its default; other configs start from here.

Not a run by itself: it has no prompts and no model.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  return ConfigDict(
    dict(
      seed=0,  # of everything random
      num_steps=100,  # learner steps
      prompts_per_step=16,  # groups that a step consumes
      completions_per_prompt=8,  # rollouts of a group, >= 2
      max_staleness=0,  # steps that a group may be behind; 0: synchronous
      model=dict(
        source='',  # GGUF, HF directory, hub name, 'package:NAME'; '': random
        tokenizer='',  # as source, or 'chars:ALPHABET'; '': that of source
        architecture=dict(),  # sizes where source=''; models/base.py has them
      ),
      mesh=dict(
        mode='colocated',  # colocated | split
        num_cpu_devices=0,  # force this many CPU devices; 0: as JAX has them
        training_data=-1,  # batch parallel; -1: the devices that remain
        training_fsdp=1,  # batch and parameters
        training_tensor=1,  # heads, ffn, vocabulary
        generation_data=1,  # engines
        generation_tensor=1,  # devices of an engine
      ),
      prompts=dict(
        seed=0,  # order of the data, besides the run's seed; held-out set
        max_prompt_tokens=128,  # after the chat template; longer are dropped
        chat=False,  # render by the tokeniser's chat template
        system='',  # system message, with chat
        template='{prompt}',  # what stands around a row's prompt
        train=dict(),  # label=dict(name=SOURCE, weight=1.0, ...its keys)
        heldout=dict(),  # label=dict(name=SOURCE, ...its keys)
      ),
      sampling=dict(
        max_tokens=64,  # of a completion, the stop token included
        temperature=1.0,  # > 0
        top_k=0,  # 0: all
        top_p=1.0,  # 1: all
        min_p=0.0,  # 0: all
      ),
      generator=dict(
        num_slots=64,  # sequences decoded at once, per engine
        page_size=16,  # tokens of a KV page
        num_pages=0,  # of an engine's pool; 0: all slots fit
        steps_per_dispatch=8,  # tokens decoded per slot and dispatch
        prefill_tokens=512,  # prompt tokens of a prefill dispatch
        prefill_chunk=32,  # of them, that one prompt takes at a time
        dtype='float32',  # float32 | bfloat16, of weights and KV
        weight_format='dtype',  # dtype | int8, of matrices
        kv_format='dtype',  # dtype | int8, of the KV cache
        attention='auto',  # auto | xla_loop | pallas_tpu
        unroll_layers=True,  # faster on CPU; False compiles faster
        prefix_cache=True,  # prompts that begin alike share pages
        speculate=0,  # drafted tokens that a slot has verified at once
        top_logprobs=0,  # likeliest tokens told beside each drawn one
        dispatches_ahead=-1,  # sent before one's results are read; -1: auto
        order='fifo',  # of a step's requests: fifo | longest expected first
        on_new_weights='keep',  # running rollouts' KV: keep|recompute|drain
      ),
      verifier=dict(
        name='math_answer',  # module of verifiers/, or import path
      ),  # and the verifier's own keys
      service=dict(
        num_workers=1,  # verifier processes on this host
        deadline_seconds=5.0,  # of one item; then its process is killed
        max_pending=1024,  # open items before generation waits
      ),
      algorithm=dict(
        name='grpo',  # module of algorithms/, or import path
      ),  # and the algorithm's own keys, see its Config
      learner=dict(
        row_tokens=512,  # length of a packed row
        rows_per_microbatch=4,  # over the whole training mesh
        logprob_chunk=128,  # tokens of a row whose logits exist at once
        compute_dtype='float32',  # float32 | bfloat16; masters are float32
        remat=True,  # recompute blocks in the backward pass: less memory
      ),
      optimizer=dict(
        learning_rate=1e-4,  # peak, of AdamW
        warmup_steps=0,  # linear
        decay='constant',  # constant | linear | cosine
        final_fraction=0.0,  # of the peak, where decay ends
        b1=0.9,  # decay of the mean of gradients
        b2=0.95,  # decay of the mean of their squares
        eps=1e-8,  # added to the root of that
        weight_decay=0.0,  # of matrices only
        max_grad_norm=1.0,  # 0: no clipping
      ),
      sft=dict(
        num_steps=0,  # supervised steps before RL; 0: none
        examples_per_step=64,  # solutions that a step imitates
        learning_rate=1e-3,  # this and the rest as in optimizer
        warmup_steps=0,  # linear
        decay='constant',  # constant | linear | cosine
        final_fraction=0.0,  # of the peak, where decay ends
        b1=0.9,  # decay of the mean of gradients
        b2=0.95,  # decay of the mean of their squares
        eps=1e-8,  # added to the root of that
        weight_decay=0.0,  # of matrices only
        max_grad_norm=1.0,  # 0: no clipping
      ),
      evaluation=dict(
        num_prompts=256,  # held-out
        samples_per_prompt=1,  # completions of each
        ks=(1,),  # pass@k to report, each <= samples_per_prompt
        temperature=1.0,  # 0: greedy
        top_k=0,  # 0: all
        top_p=1.0,  # 1: all
        min_p=0.0,  # 0: all
        stop_strings=(),  # each ends a completion, and is not of its text
        min_tokens=0,  # before which nothing ends a completion
        repetition_penalty=1.0,  # 1: none; of prompt and completion
        presence_penalty=0.0,  # 0: none; of tokens in the completion
        frequency_penalty=0.0,  # 0: none; each time they are in it
        logit_bias=(),  # (token id, added to its logit) pairs
        max_tokens=0,  # 0: as in sampling
        every_steps=0,  # 0: only before and after
      ),
      parity=dict(
        num_prompts=4,  # completed and scored by generator and learner
        max_abs=0.0,  # of a log-prob; above it no start. 0: by precision
        mean_abs=0.0,  # as max_abs, of the mean over tokens
      ),
      checkpoint=dict(
        every_steps=10,  # learner (and SFT) steps between checkpoints
        keep=2,  # newest ones kept
      ),
    )
  )
