package io.github.headrace;

import io.github.headrace.v1.BeamSearch;
import io.github.headrace.v1.Choice;
import io.github.headrace.v1.GenerationSpec;
import io.github.headrace.v1.JsonObject;
import io.github.headrace.v1.StructuralTag;
import io.github.headrace.v1.StructuredOutput;
import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Map;

/**
 * How to sample, when to stop, what to report: all options of a generation. What is not set is the
 * model's default, then the server's.
 *
 * <p>Ranges are the server's to check: it refuses with field, rule and limit. Only what the wire
 * format cannot carry is refused here.
 */
public final class GenerationOptions {
    private static final GenerationOptions DEFAULTS = builder().build();

    private final GenerationSpec spec;

    private GenerationOptions(GenerationSpec spec) {
        this.spec = spec;
    }

    /**
     * Starts with everything at its default.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder(GenerationSpec.newBuilder());
    }

    /**
     * All options at their defaults.
     *
     * @return the options
     */
    public static GenerationOptions defaults() {
        return DEFAULTS;
    }

    /**
     * Starts with these options.
     *
     * @return a builder; these options stay as they are
     */
    public Builder toBuilder() {
        return new Builder(spec.toBuilder());
    }

    /** The message, without a prompt. */
    GenerationSpec spec() {
        return spec;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof GenerationOptions options && spec.equals(options.spec);
    }

    @Override
    public int hashCode() {
        return spec.hashCode();
    }

    @Override
    public String toString() {
        return "GenerationOptions[" + spec.toString().strip().replaceAll("\\s*\n\\s*", " ") + "]";
    }

    /** Collects options. Each method returns the builder. */
    public static final class Builder {
        private final GenerationSpec.Builder spec;

        private Builder(GenerationSpec.Builder spec) {
            this.spec = spec;
        }

        /**
         * The options as set so far.
         *
         * @return options that do not change any more
         */
        public GenerationOptions build() {
            return new GenerationOptions(spec.build());
        }

        /**
         * Name of the model. Default: the server's default model.
         *
         * @param model name as {@code listModels} reports it
         * @return this builder
         */
        public Builder model(String model) {
            spec.setModel(Wire.utf8("spec.model", model));
            return this;
        }

        /**
         * Divides the logits; 0 is greedy. Default: the model's, else 1.
         *
         * @param temperature 0, or 0.01 to 100
         * @return this builder
         */
        public Builder temperature(double temperature) {
            spec.getSamplingBuilder().setTemperature((float) temperature);
            return this;
        }

        /**
         * Keeps the most likely tokens whose probabilities reach this sum. Default: the model's,
         * else 1.
         *
         * @param topP above 0, to 1
         * @return this builder
         */
        public Builder topP(double topP) {
            spec.getSamplingBuilder().setTopP((float) topP);
            return this;
        }

        /**
         * Keeps this many of the most likely tokens; 0 and -1 keep all. Default: the model's, else
         * 0.
         *
         * @param topK -1 to the vocabulary size
         * @return this builder
         */
        public Builder topK(int topK) {
            spec.getSamplingBuilder().setTopK(topK);
            return this;
        }

        /**
         * Keeps tokens at least this likely relative to the most likely one. Default 0.
         *
         * @param minP 0 to 1
         * @return this builder
         */
        public Builder minP(double minP) {
            spec.getSamplingBuilder().setMinP((float) minP);
            return this;
        }

        /**
         * Keeps logits at most so many standard deviations below the highest one; 0 keeps all.
         * Default 0.
         *
         * @param topNSigma 0 to 100
         * @return this builder
         */
        public Builder topNSigma(double topNSigma) {
            spec.getSamplingBuilder().setTopNSigma((float) topNSigma);
            return this;
        }

        /**
         * Divides positive and multiplies negative logits of tokens seen. Default: the model's,
         * else 1.
         *
         * @param repetitionPenalty 0.01 to 10
         * @return this builder
         */
        public Builder repetitionPenalty(double repetitionPenalty) {
            spec.getSamplingBuilder().setRepetitionPenalty((float) repetitionPenalty);
            return this;
        }

        /**
         * Subtracted from the logits of tokens in the output. Default 0.
         *
         * @param presencePenalty -2 to 2
         * @return this builder
         */
        public Builder presencePenalty(double presencePenalty) {
            spec.getSamplingBuilder().setPresencePenalty((float) presencePenalty);
            return this;
        }

        /**
         * Subtracted once for each time the output contains the token. Default 0.
         *
         * @param frequencyPenalty -2 to 2
         * @return this builder
         */
        public Builder frequencyPenalty(double frequencyPenalty) {
            spec.getSamplingBuilder().setFrequencyPenalty((float) frequencyPenalty);
            return this;
        }

        /**
         * Seed of the sampling noise. Default: drawn by the server.
         *
         * @param seed any 64 bits, read as unsigned
         * @return this builder
         */
        public Builder seed(long seed) {
            spec.getSamplingBuilder().setSeed(seed);
            return this;
        }

        /**
         * Most tokens per output. Default: what the context leaves.
         *
         * @param maxTokens at least 1
         * @return this builder
         */
        public Builder maxTokens(int maxTokens) {
            spec.getStopBuilder().setMaxTokens(Wire.unsigned("spec.stop.max_tokens", maxTokens));
            return this;
        }

        /**
         * Fewest tokens per output. Default 0.
         *
         * @param minTokens 0 to {@code maxTokens}
         * @return this builder
         */
        public Builder minTokens(int minTokens) {
            spec.getStopBuilder().setMinTokens(Wire.unsigned("spec.stop.min_tokens", minTokens));
            return this;
        }

        /**
         * Whether to go on past the model's end-of-text tokens. Default false.
         *
         * @param ignoreEos true to go on
         * @return this builder
         */
        public Builder ignoreEos(boolean ignoreEos) {
            spec.getStopBuilder().setIgnoreEos(ignoreEos);
            return this;
        }

        /**
         * Whether a matched stop string stays in the text. Default false.
         *
         * @param includeStopString true to keep it
         * @return this builder
         */
        public Builder includeStopString(boolean includeStopString) {
            spec.getStopBuilder().setIncludeStopString(includeStopString);
            return this;
        }

        /**
         * Outputs sampled from the prompt in parallel. Default 1.
         *
         * @param n 1 to 128
         * @return this builder
         */
        public Builder n(int n) {
            spec.setN(Wire.unsigned("spec.n", n));
            return this;
        }

        /**
         * How many of the most likely tokens to report, with log probabilities, beside each sampled
         * one. Default: none at all.
         *
         * @param logprobs 0 to 20
         * @return this builder
         */
        public Builder logprobs(int logprobs) {
            spec.setLogprobs(Wire.unsigned("spec.logprobs", logprobs));
            return this;
        }

        /**
         * How many of the most likely tokens to report at each position of the prompt, which is
         * then computed whole. Default: none at all.
         *
         * @param promptLogprobs 0 to 20
         * @return this builder
         */
        public Builder promptLogprobs(int promptLogprobs) {
            spec.setPromptLogprobs(Wire.unsigned("spec.prompt_logprobs", promptLogprobs));
            return this;
        }

        /**
         * Higher runs first. Default 0.
         *
         * @param priority -100 to 100
         * @return this builder
         */
        public Builder priority(int priority) {
            spec.setPriority(priority);
            return this;
        }

        /**
         * Most tokens that each output of a conversation may spend on its reasoning. Default: no
         * limit but that of the output.
         *
         * @param maxReasoningTokens at least 1
         * @return this builder
         */
        public Builder maxReasoningTokens(int maxReasoningTokens) {
            spec.setMaxReasoningTokens(Wire.unsigned("spec.max_reasoning_tokens", maxReasoningTokens));
            return this;
        }

        /**
         * How much the model is to reason before it answers; conversations only, with a model whose
         * chat template takes it. Default: the template's.
         *
         * @param effort how much
         * @return this builder
         */
        public Builder reasoningEffort(ReasoningEffort effort) {
            spec.setReasoningEffort(effort.wire());
            return this;
        }

        /**
         * Most drafted tokens that a step verifies for an output, where the server drafts. Answers
         * are the same. Default: the server's setting.
         *
         * @param maxDrafts 1 to 8, or 0 for none
         * @return this builder
         */
        public Builder maxDrafts(int maxDrafts) {
            if (maxDrafts == 0) {
                spec.getSpeculationBuilder().setOff(true);
            } else {
                spec.getSpeculationBuilder()
                        .setMaxDrafts(Wire.unsigned("spec.speculation.max_drafts", maxDrafts));
            }
            return this;
        }

        /**
         * Shares cached prefixes only with requests of the same salt. Default: the empty salt.
         *
         * @param cacheSalt at most 256 bytes
         * @return this builder
         */
        public Builder cacheSalt(String cacheSalt) {
            spec.setCacheSalt(Wire.utf8("spec.cache_salt", cacheSalt));
            return this;
        }

        /**
         * Whether special tokens are left out of the text. Default true.
         *
         * @param skipSpecialTokens false to keep them
         * @return this builder
         */
        public Builder skipSpecialTokens(boolean skipSpecialTokens) {
            spec.setSkipSpecialTokens(skipSpecialTokens);
            return this;
        }

        /**
         * Whether deltas carry token ids alone, without text and without waiting for whole
         * characters. Default false.
         *
         * @param tokenIdsOnly true for ids alone
         * @return this builder
         */
        public Builder tokenIdsOnly(boolean tokenIdsOnly) {
            spec.setTokenIdsOnly(tokenIdsOnly);
            return this;
        }

        /**
         * How much of each token's way is traced, if the generation is traced at all. Default: the
         * server's setting.
         *
         * @param detail nothing, arrays on the request's span, or a span per token
         * @return this builder
         */
        public Builder traceDetail(TraceDetail detail) {
            spec.setTraceDetail(detail.wire());
            return this;
        }

        /**
         * Added to the logits of these token ids. Replaces what was set before.
         *
         * @param bias token id to -100 to 100; at most 1,024 entries
         * @return this builder
         */
        public Builder logitBias(Map<Integer, ? extends Number> bias) {
            spec.getSamplingBuilder().clearLogitBias();
            bias.forEach((id, value) -> spec.getSamplingBuilder()
                    .putLogitBias(Wire.unsigned("spec.sampling.logit_bias", id), value.floatValue()));
            return this;
        }

        /**
         * Strings that end the output; the text ends before the match. Replaces what was set
         * before.
         *
         * @param strings at most 16, of 1 to 256 bytes each
         * @return this builder
         */
        public Builder stop(String... strings) {
            spec.getStopBuilder().clearStrings();
            List.of(strings).forEach(text -> spec.getStopBuilder().addStrings(Wire.utf8("spec.stop.strings", text)));
            return this;
        }

        /**
         * Tokens that end the output, besides the model's own. Replaces what was set before.
         *
         * @param ids at most 64
         * @return this builder
         */
        public Builder stopTokenIds(Collection<Integer> ids) {
            spec.getStopBuilder().clearTokenIds();
            ids.forEach(id -> spec.getStopBuilder().addTokenIds(Wire.unsigned("spec.stop.token_ids", id)));
            return this;
        }

        /**
         * Words that are never generated. Replaces what was set before.
         *
         * @param words at most 64, of 1 to 256 bytes each
         * @return this builder
         */
        public Builder badWords(Collection<String> words) {
            spec.getStopBuilder().clearBadWords();
            words.forEach(word -> spec.getStopBuilder().addBadWords(Wire.utf8("spec.stop.bad_words", word)));
            return this;
        }

        /**
         * Longest time from acceptance to the last token; what there is by then is the answer.
         * Default: the call's deadline, else the server's limit.
         *
         * @param limit above 0, at most 24 hours
         * @return this builder
         */
        public Builder timeLimit(Duration limit) {
            spec.setTimeLimit(Wire.duration(limit));
            return this;
        }

        /**
         * Only outputs that a JSON Schema allows. Of this and the forms after it the last one that
         * is given counts.
         *
         * @param schema JSON text
         * @return this builder
         */
        public Builder jsonSchema(String schema) {
            String field = "spec.structured_output.json_schema";
            spec.setStructuredOutput(StructuredOutput.newBuilder().setJsonSchema(Wire.utf8(field, schema)));
            return this;
        }

        /**
         * Only outputs that match a regular expression as a whole.
         *
         * @param expression the expression
         * @return this builder
         */
        public Builder regex(String expression) {
            String field = "spec.structured_output.regex";
            spec.setStructuredOutput(StructuredOutput.newBuilder().setRegex(Wire.utf8(field, expression)));
            return this;
        }

        /**
         * Only outputs of a context-free grammar.
         *
         * @param grammar in Lark's notation
         * @return this builder
         */
        public Builder grammar(String grammar) {
            String field = "spec.structured_output.grammar";
            spec.setStructuredOutput(StructuredOutput.newBuilder().setGrammar(Wire.utf8(field, grammar)));
            return this;
        }

        /**
         * Only outputs that are JSON objects.
         *
         * @return this builder
         */
        public Builder jsonObject() {
            spec.setStructuredOutput(
                    StructuredOutput.newBuilder().setJsonObject(JsonObject.getDefaultInstance()));
            return this;
        }

        /**
         * Only outputs that are one of some texts.
         *
         * @param texts at least one, none of them empty
         * @return this builder
         */
        public Builder choice(Collection<String> texts) {
            Choice.Builder choice = Choice.newBuilder();
            texts.forEach(text -> choice.addTexts(Wire.utf8("spec.structured_output.choice.texts", text)));
            spec.setStructuredOutput(StructuredOutput.newBuilder().setChoice(choice));
            return this;
        }

        /**
         * A part of outputs that has a form, as soon as free text has come to its trigger. May be
         * called for several.
         *
         * @param trigger the text from which on the output has the form
         * @param begin how the part begins, the trigger included
         * @param schema JSON text of a JSON Schema, of what follows
         * @param end how the part ends
         * @return this builder
         */
        public Builder structuralTag(String trigger, String begin, String schema, String end) {
            String field = "spec.structured_output.structural_tags.tags";
            spec.getStructuredOutputBuilder()
                    .getStructuralTagsBuilder()
                    .addTags(StructuralTag.newBuilder()
                            .setTrigger(Wire.utf8(field, trigger))
                            .setBegin(Wire.utf8(field, begin))
                            .setJsonSchema(Wire.utf8(field, schema))
                            .setEnd(Wire.utf8(field, end)));
            return this;
        }

        /**
         * Samples more outputs than are returned: the n with the largest mean log probability come
         * whole, at the end.
         *
         * @param count outputs to sample, n to 20
         * @return this builder
         */
        public Builder bestOf(int count) {
            spec.setBestOf(Wire.unsigned("spec.best_of", count));
            return this;
        }

        /**
         * Beam search instead of sampling: the n most likely outputs that it finds come whole, at
         * the end.
         *
         * @param width outputs kept at each step, 1 to 16, at least n
         * @param lengthPenalty exponent of the length that log probabilities are divided by; 1 is
         *     usual
         * @return this builder
         */
        public Builder beamSearch(int width, double lengthPenalty) {
            return beamSearch(width, lengthPenalty, EarlyStopping.HEURISTIC);
        }

        /**
         * Beam search instead of sampling: the n most likely outputs that it finds come whole, at
         * the end.
         *
         * @param width outputs kept at each step, 1 to 16, at least n
         * @param lengthPenalty exponent of the length that log probabilities are divided by; 1 is
         *     usual
         * @param earlyStopping when it ends
         * @return this builder
         */
        public Builder beamSearch(int width, double lengthPenalty, EarlyStopping earlyStopping) {
            spec.setBeamSearch(BeamSearch.newBuilder()
                    .setWidth(Wire.unsigned("spec.beam_search.width", width))
                    .setLengthPenalty((float) lengthPenalty)
                    .setEarlyStopping(earlyStopping.wire()));
            return this;
        }
    }
}
