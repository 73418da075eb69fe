package io.github.headrace;

import java.util.Collection;
import java.util.List;

/** What a generation continues: text, or tokens. Conversations are a {@link Conversation}. */
public sealed interface Prompt {

    /**
     * Text, encoded by the server with the model's tokenizer.
     *
     * @param text UTF-8 text, not empty
     * @return the prompt
     */
    static Prompt text(String text) {
        return new Text(text);
    }

    /**
     * Tokens, used as they are.
     *
     * @param ids at least one
     * @return the prompt
     */
    static Prompt tokens(Collection<Integer> ids) {
        return new Tokens(List.copyOf(ids));
    }

    /**
     * A prompt of text.
     *
     * @param text UTF-8 text, not empty
     */
    record Text(String text) implements Prompt {}

    /**
     * A prompt of tokens.
     *
     * @param ids at least one, each below the vocabulary size
     */
    record Tokens(List<Integer> ids) implements Prompt {}
}
