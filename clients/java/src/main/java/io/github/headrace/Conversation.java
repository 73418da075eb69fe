package io.github.headrace;

import java.util.List;
import java.util.Optional;

/**
 * The prompt of a chat: laid out by the model's own template.
 *
 * @param messages oldest first
 * @param continueLastMessage whether the model continues the last message, which is then the
 *     assistant's, instead of answering it
 * @param tools functions that the model may call; empty: none
 */
public record Conversation(List<ChatMessage> messages, boolean continueLastMessage, Optional<ToolUse> tools) {

    /**
     * Copies the messages.
     *
     * @param messages oldest first
     * @param continueLastMessage whether the model continues the last message
     * @param tools functions that the model may call
     */
    public Conversation {
        messages = List.copyOf(messages);
    }

    /**
     * A conversation without tools.
     *
     * @param messages oldest first
     * @param continueLastMessage whether the model continues the last message
     */
    public Conversation(List<ChatMessage> messages, boolean continueLastMessage) {
        this(messages, continueLastMessage, Optional.empty());
    }

    /**
     * This conversation with functions that the model may call.
     *
     * @param use the functions, and whether the model calls them
     * @return the conversation
     */
    public Conversation with(ToolUse use) {
        return new Conversation(messages, continueLastMessage, Optional.of(use));
    }

    /**
     * A conversation whose last message is to be answered.
     *
     * @param messages oldest first
     * @return the conversation
     */
    public static Conversation of(List<ChatMessage> messages) {
        return new Conversation(messages, false);
    }

    /**
     * One message of the person's.
     *
     * @param text what is said
     * @return the conversation
     */
    public static Conversation of(String text) {
        return of(List.of(ChatMessage.user(text)));
    }
}
