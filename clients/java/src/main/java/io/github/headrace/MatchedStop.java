package io.github.headrace;

/** What ended an output. */
public sealed interface MatchedStop {

    /**
     * A stop token, or one of the model's end-of-text tokens.
     *
     * @param id the token
     */
    record Token(int id) implements MatchedStop {}

    /**
     * A stop string.
     *
     * @param text the string
     */
    record Text(String text) implements MatchedStop {}
}
