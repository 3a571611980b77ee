"""Stand-in for the generation tests: `generate` with decoder-only models that have a key-value cache.

Written for this project; the referee is the model itself on a plainer path (no cache, no padding, eager, greedy).
Left out: encoder-decoder models, models without a cache, and what is the library's affair alone (logits processors,
stopping criteria, watermarks).
"""

import copy

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerFast, StaticCache, pipeline, set_seed
from transformers.generation.configuration_utils import CompileConfig
from transformers.testing_utils import torch_device


NEW_TOKENS = 6
PROMPT_LENGTH = 5


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


class GenerationTesterMixin:
    def generative_models(self):
        """Yield a seeded eval model of each generating class, with three unpadded prompts and no EOS token."""
        config, _ = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_generative_model_classes:
            set_seed(0)
            model = model_class(copy.deepcopy(config)).to(torch_device).eval()
            model.generation_config = GenerationConfig(pad_token_id=0, max_new_tokens=NEW_TOKENS, do_sample=False)
            yield model, torch.randint(3, config.vocab_size, (3, PROMPT_LENGTH), device=torch_device)

    def scored(self, model, prompts, **options):
        """Generate, and check the number of new tokens in every row."""
        set_seed(1)  # equal random draws for both sides of a comparison
        out = model.generate(prompts, return_dict_in_generate=True, output_logits=True, output_scores=True, **options)
        self.assertEqual(len(out.logits), NEW_TOKENS)
        return out

    def assert_same_text(self, actual, expected, tolerance=1e-5):
        self.assertEqual(actual.sequences.tolist(), expected.sequences.tolist())
        close(torch.stack(actual.logits), torch.stack(expected.logits), tolerance)

    def check_cached_equals_uncached(self, **options):
        for model, prompts in self.generative_models():
            cached, uncached = (self.scored(model, prompts, use_cache=use, **options) for use in (True, False))
            self.assert_same_text(cached, uncached)
            self.assertIsNone(uncached.past_key_values)

    def test_a_class_that_generates_is_a_generation_mixin(self):
        self.assertTrue(self.all_generative_model_classes)
        for model_class in self.all_generative_model_classes:
            self.assertTrue(issubclass(model_class, GenerationMixin))

    def test_greedy_with_cache_equals_without(self):
        self.check_cached_equals_uncached()

    def test_sampling_with_cache_equals_without(self):
        self.check_cached_equals_uncached(do_sample=True, top_k=20, temperature=1.5)

    def test_beams_with_cache_equal_those_without(self):
        self.check_cached_equals_uncached(num_beams=3, num_return_sequences=2)

    def test_sampled_beams_with_cache_equal_those_without(self):
        self.check_cached_equals_uncached(num_beams=2, do_sample=True, top_k=0)

    def test_greedy_logits_are_those_of_one_forward_over_the_whole_text(self):
        for model, prompts in self.generative_models():
            out = self.scored(model, prompts)
            logits = model(out.sequences[:, :-1], use_cache=False).logits[:, PROMPT_LENGTH - 1 :]
            close(torch.stack(out.logits, 1), logits.float())

    def test_static_cache_equals_dynamic(self):
        for options in ({}, {"num_beams": 2}):
            for model, prompts in self.generative_models():
                static = self.scored(model, prompts, cache_implementation="static", **options)
                self.assertIsInstance(static.past_key_values, StaticCache)
                self.assert_same_text(static, self.scored(model, prompts, **options))

    def test_left_padding_changes_nothing(self):
        for model, prompts in self.generative_models():
            alone = self.scored(model, prompts[:1])
            pads = torch.tensor([4, 0, 2], device=torch_device)[:, None]
            kept = torch.arange(4 + PROMPT_LENGTH, device=torch_device)[None] >= pads
            padded = torch.randint(3, 90, kept.shape, device=torch_device) * kept
            padded[0, 4:] = prompts[0]
            for cache in (None, "static"):
                out = self.scored(model, padded, attention_mask=kept.long(), cache_implementation=cache)
                self.assertEqual(out.sequences[0, 4:].tolist(), alone.sequences[0].tolist())
                close(torch.stack(out.logits)[:, 0], torch.stack(alone.logits)[:, 0])

    def test_position_ids_default_to_those_of_the_mask(self):
        for model, prompts in self.generative_models():
            mask = torch.ones_like(prompts)
            mask[1, :2] = 0
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            given = self.scored(model, prompts, attention_mask=mask, position_ids=positions)
            self.assert_same_text(given, self.scored(model, prompts, attention_mask=mask))

    def test_input_embeddings_equal_input_ids(self):
        for model, prompts in self.generative_models():
            expected = self.scored(model, prompts)
            for cache in (None, "static"):
                embeds = model.get_input_embeddings()(prompts).detach()
                out = self.scored(model, None, inputs_embeds=embeds, cache_implementation=cache)
                self.assertEqual(out.sequences.tolist(), expected.sequences[:, PROMPT_LENGTH:].tolist())
                close(torch.stack(out.logits), torch.stack(expected.logits))

    def test_generation_continues_from_a_returned_cache(self):
        for model, prompts in self.generative_models():
            whole = self.scored(model, prompts)
            start = model.generate(prompts, max_new_tokens=NEW_TOKENS - 2, return_dict_in_generate=True)
            rest = model.generate(start.sequences, past_key_values=start.past_key_values, max_new_tokens=2)
            self.assertEqual(rest.tolist(), whole.sequences.tolist())

    def test_prefill_in_chunks_equals_prefill_at_once(self):
        for model, prompts in self.generative_models():
            self.assert_same_text(self.scored(model, prompts, prefill_chunk_size=2), self.scored(model, prompts))

    def test_assisted_decoding_equals_greedy(self):
        for model, prompts in self.generative_models():
            set_seed(2)
            assistant = type(model)(copy.deepcopy(model.config)).to(torch_device).eval()
            assistant.generation_config = copy.deepcopy(model.generation_config)
            for helper in (assistant, copy.deepcopy(model)):
                out = self.scored(model, prompts[:1], assistant_model=helper)
                self.assert_same_text(out, self.scored(model, prompts[:1]))

    def test_prompt_lookup_equals_greedy(self):
        for model, prompts in self.generative_models():
            repeated = prompts[:1].repeat(1, 3)
            out = self.scored(model, repeated, prompt_lookup_num_tokens=2)
            self.assert_same_text(out, self.scored(model, repeated))

    def test_generation_without_a_prompt_starts_from_bos(self):
        for model, prompts in self.generative_models():
            bos = torch.full_like(prompts[:1, :1], 1)
            self.assertEqual(model.generate(bos_token_id=1).tolist(), model.generate(bos).tolist())

    def test_logits_are_kept_for_the_last_positions_only(self):
        for model, prompts in self.generative_models():
            every = model(prompts).logits
            for keep in (1, 3, torch.tensor([0, 2])):
                chosen = slice(-keep, None) if isinstance(keep, int) else keep
                close(model(prompts, logits_to_keep=keep).logits, every[:, chosen])

    def test_the_cache_has_one_slot_of_known_shape_for_each_layer_visit(self):
        for model, prompts in self.generative_models():
            cache = self.scored(model, prompts).past_key_values
            config = model.config
            shape = (3, config.num_key_value_heads, PROMPT_LENGTH + NEW_TOKENS - 1, config.head_dim)
            self.assertEqual(len(cache.layers), config.num_hidden_layers)
            for layer in cache.layers:
                self.assertEqual((tuple(layer.keys.shape), tuple(layer.values.shape)), (shape, shape))
            self.assertEqual(cache.get_seq_length(), PROMPT_LENGTH + NEW_TOKENS - 1)

    def test_hidden_states_and_attentions_come_with_each_token(self):
        for model, prompts in self.generative_models():
            model.set_attn_implementation("eager")
            out = self.scored(model, prompts, output_hidden_states=True, output_attentions=True)
            config = model.config
            for step, (states, attentions) in enumerate(zip(out.hidden_states, out.attentions)):
                queries, keys = (PROMPT_LENGTH, PROMPT_LENGTH) if step == 0 else (1, PROMPT_LENGTH + step)
                self.assertEqual(len(states), config.num_hidden_layers + 1)
                self.assertEqual({tuple(state.shape) for state in states}, {(3, queries, config.hidden_size)})
                self.assertEqual(len(attentions), config.num_hidden_layers)
                weights = (3, config.num_attention_heads, queries, keys)
                self.assertEqual({tuple(a.shape) for a in attentions}, {weights})

    def test_eager_attention_generates_what_sdpa_does(self):
        for model, prompts in self.generative_models():
            sdpa = self.scored(model, prompts)
            model.set_attn_implementation("eager")
            self.assert_same_text(self.scored(model, prompts), sdpa)

    def test_a_compiled_forward_equals_the_eager_one(self):
        for model, prompts in self.generative_models():
            torch.compiler.reset()
            compiled = torch.compile(model.forward, fullgraph=True)
            close(compiled(input_ids=prompts, use_cache=False).logits, model(prompts, use_cache=False).logits)

    def test_compiled_generation_equals_eager(self):
        for model, prompts in self.generative_models():
            torch.compiler.reset()
            compile_config = CompileConfig(fullgraph=True, dynamic=False, mode="default", backend="aot_eager")
            compile_config._compile_all_devices = True  # by default generate compiles only on accelerators
            compiled = self.scored(model, prompts, cache_implementation="static", compile_config=compile_config)
            self.assertTrue(model._compiled_call is not None)
            self.assert_same_text(compiled, self.scored(model, prompts), tolerance=1e-4)

    def test_the_text_generation_pipeline_runs_the_model(self):
        vocabulary = {f"w{token}": token for token in range(self.model_tester.vocab_size)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", padding_side="left")
        for model, _ in self.generative_models():
            generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device=torch_device)
            texts = ["w4 w5 w6 w7", "w8"]
            for batch_size in (1, 2):
                for text, [answer] in zip(texts, generator(texts, batch_size=batch_size, return_full_text=False)):
                    prompt = tokenizer(text, return_tensors="pt").input_ids.to(torch_device)
                    expected = model.generate(prompt)[0, prompt.shape[1] :]
                    self.assertEqual(answer["generated_text"].split(), tokenizer.decode(expected).split())
