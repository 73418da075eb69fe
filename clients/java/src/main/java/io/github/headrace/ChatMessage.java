package io.github.headrace;

import java.util.List;

/**
 * One message of a conversation.
 *
 * @param role who said it
 * @param text what was said, or what the function returned
 * @param toolCalls the functions that the assistant called
 * @param toolCallId the call whose result this is; empty: it is none
 * @param reasoning what the assistant had written for itself; may be empty
 */
public record ChatMessage(
        Role role, String text, List<ToolCall> toolCalls, String toolCallId, String reasoning) {

    /**
     * Copies the calls.
     *
     * @param role who said it
     * @param text what was said
     * @param toolCalls the functions that the assistant called
     * @param toolCallId the call whose result this is
     * @param reasoning what the assistant had written for itself
     */
    public ChatMessage {
        toolCalls = List.copyOf(toolCalls);
    }

    /**
     * A message that is text alone.
     *
     * @param role who said it
     * @param text what was said
     */
    public ChatMessage(Role role, String text) {
        this(role, text, List.of(), "", "");
    }

    /** Who said a message. */
    public enum Role {
        /** The operator's instructions. */
        SYSTEM,
        /** The person. */
        USER,
        /** The model. */
        ASSISTANT,
        /** A function that the model had called. */
        TOOL
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

    /**
     * What a function that the model had called returned.
     *
     * @param call the call
     * @param text what it returned
     * @return the message
     */
    public static ChatMessage toolResult(ToolCall call, String text) {
        return new ChatMessage(Role.TOOL, text, List.of(), call.id(), "");
    }
}
