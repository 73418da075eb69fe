package io.github.headrace;

/**
 * Tokens counted.
 *
 * @param promptTokens tokens of the prompt, counted once whatever n is
 * @param outputTokens tokens of all outputs, end-of-text tokens included
 * @param cachedTokens prompt tokens found in the prefix cache
 * @param reasoningTokens output tokens that were reasoning
 */
public record Usage(int promptTokens, int outputTokens, int cachedTokens, int reasoningTokens) {

    static Usage from(io.github.headrace.v1.Usage usage) {
        return new Usage(
                usage.getPromptTokens(),
                usage.getOutputTokens(),
                usage.getCachedTokens(),
                usage.getReasoningTokens());
    }
}
