package io.github.headrace;

/**
 * One message of a conversation.
 *
 * @param role who said it
 * @param text what was said
 */
public record ChatMessage(Role role, String text) {

    /** Who said a message. */
    public enum Role {
        /** The operator's instructions. */
        SYSTEM,
        /** The person. */
        USER,
        /** The model. */
        ASSISTANT
    }

    /**
     * A message of the operator's.
     *
     * @param text what is said
     * @return the message
     */
    public static ChatMessage system(String text) {
        return new ChatMessage(Role.SYSTEM, text);
    }

    /**
     * A message of the person's.
     *
     * @param text what is said
     * @return the message
     */
    public static ChatMessage user(String text) {
        return new ChatMessage(Role.USER, text);
    }

    /**
     * A message of the model's.
     *
     * @param text what is said
     * @return the message
     */
    public static ChatMessage assistant(String text) {
        return new ChatMessage(Role.ASSISTANT, text);
    }
}
