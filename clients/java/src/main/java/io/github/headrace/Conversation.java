package io.github.headrace;

import java.util.List;

/**
 * The prompt of a chat: laid out by the model's own template.
 *
 * @param messages oldest first
 * @param continueLastMessage whether the model continues the last message, which is then the
 *     assistant's, instead of answering it
 */
public record Conversation(List<ChatMessage> messages, boolean continueLastMessage) {

    /**
     * Copies the messages.
     *
     * @param messages oldest first
     * @param continueLastMessage whether the model continues the last message
     */
    public Conversation {
        messages = List.copyOf(messages);
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
